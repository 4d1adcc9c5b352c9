"""JSON schemas of the kinds that structured output keeps: a list by hand, and as many as wanted by chance."""

from __future__ import annotations

import random
from typing import Any

STRING = {"type": "string", "maxLength": 12}
INTEGER = {"type": "integer", "minimum": -999, "maximum": 999}
POINT = {
    "type": "object",
    "properties": {"x": INTEGER, "y": INTEGER},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": list(required)} | closed | more


SCHEMAS: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    STRING,
    {"type": ["integer", "null"]},
    {"const": "fixed"},
    {"const": {"a": [1, 2, None]}},
    {"enum": ["a", "b c", 1, None, True]},
    {"enum": [{"k": 1}, [1], "é\n\""]},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 1.5, "exclusiveMaximum": 2.5},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    {"type": "string", "pattern": "^(ab|cd)+$", "maxLength": 8},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "items": INTEGER, "maxItems": 4},
    {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": INTEGER, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 2}, "maxItems": 3},
    _object({}),
    POINT,
    _object({"a": STRING, "b": INTEGER}, "a"),
    _object({"a": STRING, "b": INTEGER, "c": {"type": "boolean"}}),
    _object({"a": POINT, "b": {"type": "array", "items": POINT, "maxItems": 2}}, "a", "b"),
    _object({"é \"q\"\n": INTEGER}, "é \"q\"\n"),
    {"type": "object", "additionalProperties": INTEGER, "maxProperties": 3},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": STRING},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,5}$": INTEGER}, "additionalProperties": False},
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
    {"anyOf": [INTEGER, STRING, {"type": "null"}]},
    {"anyOf": [POINT, _object({"name": STRING}, "name")]},
    {"oneOf": [_object({"t": {"const": "p"}, "p": POINT}, "t", "p"), _object({"t": {"const": "n"}}, "t")]},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    {"allOf": [{"$ref": "#/$defs/n"}, {"maximum": 3}], "$defs": {"n": {"type": "integer", "minimum": 0}}},
    _object({"p": {"$ref": "#/$defs/p"}}, "p", **{"$defs": {"p": POINT}}),
    _object(
        {"v": INTEGER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "v", "next"
    ),
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Answer",
        "description": "of a question",
        "type": "object",
        "properties": {"ok": {"type": "boolean", "default": False, "examples": [True]}},
        "required": ["ok"],
    },
]  # fmt: skip


def generated(seed: int, depth: int = 3) -> dict[str, Any]:
    """A random schema, nested at most ``depth`` deep."""
    return _drawn(random.Random(seed), depth)


def _drawn(r: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_number, _text, _values] if depth == 0 else [_number, _text, _values, _array, _record, _union]
    return r.choice(kinds)(r, depth)


def _number(r: random.Random, _: int) -> dict[str, Any]:
    least = r.randint(-500, 500)
    bounds = {"minimum": least, "maximum": least + r.randint(1, 300)}
    return {"type": r.choice(["integer", "number"])} | r.choice([bounds, bounds | {"title": "n"}])


def _text(r: random.Random, _: int) -> dict[str, Any]:
    least = r.randint(0, 4)
    return r.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + r.randint(0, 8)},
            {"type": "string", "pattern": f"^[a-f]{{{least},{least + 3}}}-[0-9]+$", "maxLength": 14},
            {"type": "string", "format": r.choice(["date", "ipv4", "uuid"])},
        ]
    )


def _values(r: random.Random, _: int) -> dict[str, Any]:
    pool = ["red", "green", "", 0, -1.5, None, True, [1], {"a": "b"}]
    return r.choice([{"enum": r.sample(pool, r.randint(1, 5))}, {"const": r.choice(pool)}])


def _array(r: random.Random, depth: int) -> dict[str, Any]:
    least = r.randint(0, 2)
    items = {"items": _drawn(r, depth - 1), "minItems": least, "maxItems": least + r.randint(0, 2)}
    tuple_ = {"prefixItems": [_drawn(r, depth - 1) for _ in range(2)], "items": False, "minItems": 2}
    return {"type": "array"} | r.choice([items, tuple_])


def _record(r: random.Random, depth: int) -> dict[str, Any]:
    names = r.sample(["a", "b", "long name", "ключ", "x_1"], r.randint(1, 4))
    properties = {name: _drawn(r, depth - 1) for name in names}
    return _object(properties, *r.sample(names, r.randint(0, len(names))))


def _union(r: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_drawn(r, depth - 1) for _ in range(r.randint(2, 3))]}
