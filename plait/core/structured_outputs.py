"""What a caller may ask of an answer's form; names and meanings as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Ways to say what an answer looks like."""


@dataclass(slots=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first five.

    Args:
        json: a JSON schema, as an object or as text: the answer is JSON that it allows.
        json_object: the answer is any JSON object.
        regex: the answer is a text that this pattern matches from end to end.
        choice: the answer is one of these texts.
        grammar: the answer is what a context-free grammar allows, in Lark's form or in GBNF.
        disable_fallback: changes nothing: there is one library that keeps to forms.
        disable_any_whitespace, disable_additional_properties, whitespace_pattern, structural_tag: not served.

    Raises:
        ValueError: none or several of the five, one of the wrong type, or what is not served.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in self.given().items() if name in KINDS}
        if not given:
            raise ValueError(f"structured_outputs asks for nothing: give one of {', '.join(KINDS)}")
        if len(given) > 1:
            raise ValueError(f"structured_outputs asks for {' and '.join(sorted(given))}: give one of them")

    def given(self) -> dict[str, Any]:
        """The fields that ask for something."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}
