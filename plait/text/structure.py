"""What clients may ask of an answer's form, as grammars in the form of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, grammar_from

from plait.core.structured_outputs import KINDS

WHITE_SPACE = r"\n[ \t]{0,64}|[ ]"
"""Between the parts of JSON: a space, or a new line with its indentation. A model can lose itself in white
space, so there is an end to it."""
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
LENIENT = {"coerce_one_of": True, "lenient": True}
"""For schemas that are a hint: what is not supported is passed over."""
MOST_BYTES = 256 * 1024
"""Longest grammar or schema, as it is written."""
_MOST_DEPTH = 64
_NEUTRAL: dict[str, Any] = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}
"""Fields of ``structured_outputs`` that are taken where they ask for nothing."""


def of_schema(schema: Any) -> str:
    """JSON that a schema allows. Keywords that cannot be kept are an error when the grammar is compiled.

    Raises:
        ValueError: it is no schema, or says how it is to be read.
    """
    options: Any = JSON_OPTIONS
    return str(LLMatcher.grammar_from_json_schema(schema_text(schema), overrides=options))


def schema_text(schema: Any) -> str:
    """A schema as JSON.

    Raises:
        ValueError: it is no schema, is nested too deeply, or says how it is to be read.
    """
    if not isinstance(schema, Mapping):
        raise ValueError("a JSON schema is an object")
    if _too_deep(schema):
        raise ValueError(f"the schema is nested more than {_MOST_DEPTH} deep")
    if "x-guidance" in schema:
        raise ValueError("x-guidance cannot be set")
    return _limited(
        json.dumps(_readable(schema, "draft-0" in str(schema.get("$schema"))), ensure_ascii=False)
    )


def _readable(value: Any, old: bool) -> Any:
    """A schema as the library reads it: 2.0 is an integer.

    Args:
        old: of draft 7 or before, where ``$ref`` makes what stands beside it mean nothing.

    Raises:
        ValueError: it has what the library would read otherwise.
    """
    if isinstance(value, Mapping):
        if old and "$id" in value and isinstance(value.get("$ref"), str):
            raise ValueError("$id beside $ref is not served in schemas of draft 7 and before")
        return {key: _readable(inner, old) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner, old) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _limited(text: str) -> str:
    """The text itself, if it is not too long."""
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES // 1024} KiB")
    return text


def _too_deep(value: Any) -> bool:
    """Whether JSON is nested beyond what is taken; walked without recursion."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        inside = [list(v.values()) if isinstance(v, Mapping) else v for v in level]
        level = [w for v in inside if isinstance(v, list) for w in v if isinstance(w, Mapping | list)]
        if not level:
            return False
    return True


class FormError(ValueError):
    """A form that cannot be had.

    Args:
        field: what asked for it.
        message: says so in words.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def of_structured_outputs(given: Mapping[str, Any]) -> tuple[str, str, Any] | None:
    """``{"json" | "json_object" | "regex" | "choice" | "grammar": ...}``, as vLLM has it.

    Returns:
        The field that asks, the grammar, and the schema if it is JSON; None: nothing is asked for.

    Raises:
        FormError: what it asks for is not served, or is more than one thing.
    """
    top = "structured_outputs"
    asked = {key: value for key, value in given.items() if value is not None and value is not False}
    for key, values in _NEUTRAL.items():
        if asked.pop(key, False) not in values:
            raise FormError(top, f"{top}.{key} is not served; leave it out")
    if unknown := asked.keys() - set(KINDS):
        raise FormError(top, f"{top}.{min(unknown)} is not served; served are {', '.join(KINDS)}")
    if len(asked) > 1:
        raise FormError(top, f"{top} asks for {' and '.join(sorted(asked))}: send one of them")
    for kind, value in asked.items():
        field = f"{top}.{kind}"
        match kind, value:
            case "json", _:
                schema = _parsed(value, field)
                return field, _made(field, of_schema, schema), schema
            case "json_object", True:
                return field, of_json_object(), {"type": "object"}
            case "regex", str():
                return field, _made(field, of_regex, value), None
            case "choice", list() | tuple():
                return field, _made(field, of_choice, value), None
            case "grammar", str():
                return field, _made(field, of_grammar, value), None
        raise FormError(top, f"{field} is of the wrong type")
    return None


def _parsed(value: Any, field: str) -> Any:
    """A schema, perhaps written as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise FormError(field, f"{field} is no JSON") from None


def _made(field: str, make: Callable[[Any], str], value: Any) -> str:
    try:
        return make(value)
    except ValueError as fault:
        raise FormError(field, f"{field}: {fault}") from None


def of_json_object() -> str:
    """Any JSON object."""
    return of_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """Texts that a regular expression matches from end to end."""
    return str(LLMatcher.grammar_from_regex(pattern))


def of_choice(choices: Sequence[str]) -> str:
    """One of some texts.

    Raises:
        ValueError: there are none, or one is empty.
    """
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("a choice is a list of texts of which none is empty")
    return of_lark("start: " + " | ".join(map(quoted, choices)))


def of_grammar(text: str) -> str:
    """A context-free grammar, in Lark's form or in GBNF.

    Raises:
        ValueError: it is neither, or too long.
    """
    _limited(text)
    try:
        return str(grammar_from("grammar", text))
    except Exception as fault:  # the converter raises what it comes upon
        raise ValueError(f"the grammar cannot be read: {fault}") from None


def of_lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def inline(schema: Any, lenient: bool = False) -> str:
    """The JSON of a schema, as the right side of a rule of a Lark grammar.

    Raises:
        ValueError: as ``of_schema``.
    """
    value = json.loads(schema_text(schema))
    return "%json " + json.dumps(value | {"x-guidance": JSON_OPTIONS | (LENIENT if lenient else {})})
