"""From an answer's text to reasoning, content and tool calls, while the text still grows."""

from plait.text.parsing.call_grammar import Function
from plait.text.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from plait.text.parsing.formats import REASONING_PARSERS, TOOL_PARSERS
from plait.text.parsing.output import OutputFormat
from plait.text.parsing.parser import OutputParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "Function",
    "OutputFormat",
    "OutputParser",
    "Reasoning",
]
