"""What a request asks of its answer's form: fields of the APIs as grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.server.errors import APIError
from plait.text import structure

_SCHEMA_FIELDS = {"type", "name", "description", "schema", "strict"}


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
    try:
        asked = structure.of_structured_outputs(given or {})
    except structure.FormError as fault:
        raise APIError(400, str(fault), fault.field) from None
    return None if asked is None else Form(asked[1], asked[0], asked[2])


def _form(param: str, make: Callable[[Any], str], value: Any) -> Form:
    try:
        grammar = make(value)
    except ValueError as fault:
        raise APIError(400, f"{param}: {fault}", param) from None
    return Form(grammar, param, value if make is structure.of_schema else None)
