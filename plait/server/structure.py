"""What a request asks of its answer's form: fields of the APIs as grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.server.errors import APIError
from plait.text import structure

_SCHEMA_FIELDS = {"type", "name", "description", "schema", "strict"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NEUTRAL: dict[str, Any] = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer.

    Args:
        grammar: as llguidance reads it.
        param: the field that asked for it.
        schema: of the JSON that it is; None: it is something else.
    """

    grammar: str
    param: str
    schema: Any = None


def asked_form(response_format: Any, structured_outputs: Any = None) -> Form | None:
    """``response_format`` of OpenAI and ``structured_outputs`` of vLLM; None: the answer is free.

    Raises:
        APIError: neither form, or both.
    """
    a = of_response_format(response_format, "response_format", nested=True)
    b = of_structured_outputs(structured_outputs)
    if a is not None and b is not None:
        message = "response_format and structured_outputs both ask for a form: send one of them"
        raise APIError(400, message, "structured_outputs")
    return a or b


def of_response_format(given: Any, param: str, *, nested: bool) -> Form | None:
    """``{"type": "text" | "json_object" | "json_schema", ...}``.

    Args:
        given: the field, or None.
        param: its name.
        nested: the schema stands in a ``json_schema`` of its own, as in the chat API.

    Raises:
        APIError: what it asks for is not served.
    """
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    fields = set(given) if isinstance(given, Mapping) else set()
    if kind == "json_schema":
        inner = given.get("json_schema") if nested else given
        if not isinstance(inner, Mapping):
            raise APIError(400, f"{param}.json_schema must be an object with a schema", param)
        allowed = _SCHEMA_FIELDS - ({"type"} if nested else set())
        if unknown := inner.keys() - allowed | (fields - {"type", "json_schema"} if nested else set()):
            raise APIError(400, f"{param} has an unknown field {min(unknown)!r}", param)
        return _form(param, structure.of_schema, inner.get("schema"))
    if kind not in ("text", "json_object"):
        message = f"{param}.type is {kind!r}: served are 'text', 'json_object' and 'json_schema'"
        raise APIError(400, message, param)
    if unknown := fields - {"type"}:
        raise APIError(400, f"{param} has an unknown field {min(unknown)!r}", param)
    return None if kind == "text" else _form(param, structure.of_schema, {"type": "object"})


def of_structured_outputs(given: Mapping[str, Any] | None) -> Form | None:
    """``{"json" | "json_object" | "regex" | "choice" | "grammar": ...}``.

    Raises:
        APIError: what it asks for is not served, or is more than one thing.
    """
    param = "structured_outputs"
    asked = {key: value for key, value in (given or {}).items() if value is not None and value is not False}
    for key, values in _NEUTRAL.items():
        if asked.pop(key, False) not in values:
            raise APIError(400, f"{param}.{key} is not served; leave it out", param)
    if unknown := asked.keys() - set(_KINDS):
        raise APIError(400, f"{param}.{min(unknown)} is not served; served are {', '.join(_KINDS)}", param)
    if len(asked) > 1:
        raise APIError(400, f"{param} asks for {' and '.join(sorted(asked))}: send one of them", param)
    for kind, value in asked.items():
        where = f"{param}.{kind}"
        match kind, value:
            case "json", _:
                return _form(where, structure.of_schema, _parsed(value, where))
            case "json_object", True:
                return _form(where, structure.of_schema, {"type": "object"})
            case "regex", str():
                return _form(where, structure.of_regex, value)
            case "choice", list():
                return _form(where, structure.of_choice, value)
            case "grammar", str():
                return _form(where, structure.of_grammar, value)
        raise APIError(400, f"{where} is of the wrong type", param)
    return None


def _parsed(value: Any, where: str) -> Any:
    """A schema, perhaps written as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise APIError(400, f"{where} is no JSON", where) from None


def _form(param: str, make: Callable[[Any], str], value: Any) -> Form:
    try:
        grammar = make(value)
    except ValueError as fault:
        raise APIError(400, f"{param}: {fault}", param) from None
    return Form(grammar, param, value if make is structure.of_schema else None)
