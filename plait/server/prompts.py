"""What a request asks to be continued or answered, before and after it is made of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plait.server.tools import Toolbox
from plait.text.boundaries import Boundaries
from plait.text.parsing import OutputParser


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the text it came from where there was one."""

    token_ids: list[int]
    text: str | None = None
    boundaries: Boundaries = field(default_factory=Boundaries)
    parser: Callable[[], OutputParser] | None = None
    """makes the parser of one answer; None: an answer is content and nothing else"""
    shown_ids: frozenset[int] = frozenset()
    """special tokens that the parser looks for"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation to be answered, whatever API it came by.

    Args:
        messages: in the form of the chat API.
        tools: what may be called.
        template_kwargs: names for the chat template, over the server's own.
        param: the field that a complaint about the messages names.
    """

    messages: list[dict[str, Any]]
    tools: Toolbox = field(default_factory=Toolbox)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    param: str = "messages"
