"""Requests that are wrong, of every kind and for every endpoint, each with words that its error must have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

JSON = "application/json"
USER = [{"role": "user", "content": "héllo"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4, "temperature": 0.5, "stop": ["x"]},
    "/v1/completions": {"prompt": "héllo", "max_tokens": 4, "temperature": 0.5},
    "/v1/responses": {"input": "héllo", "max_output_tokens": 4, "temperature": 0.5},
    "/v1/messages": {"model": "tiny", "max_tokens": 4, "messages": USER, "temperature": 0.5},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER},
    "/tokenize": {"prompt": "héllo"},
    "/detokenize": {"tokens": [65, 66]},
}
"""A request for each endpoint in which nothing is wrong."""


@dataclass(frozen=True)
class Request:
    """A request with a fault. ``raw``: all that goes over the connection, where HTTP itself is at fault."""

    kind: str
    path: str
    words: str
    """a pattern that the error's message must hold"""
    body: bytes = b""
    content_type: str | None = JSON
    method: str = "POST"
    raw: bytes | None = None


Make = Callable[[random.Random, str, dict[str, Any]], Request]
_MAKERS: dict[str, Make] = {}
_NO_JSON = "the body is not valid JSON: "


def _kind(make: Make) -> Make:
    _MAKERS[make.__name__] = make
    return make


def _encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _nest(rng: random.Random, body: dict[str, Any], value: str) -> bytes:
    """The body with a further piece of JSON in it, in one of its places."""
    text, mark = json.dumps(body | {"metadata": {"a": ["@"]}}), '"@"'
    if rng.random() < 0.5:
        text = json.dumps(body | {rng.choice(list(body)): "@"})
    return text.replace(mark, value, 1).encode()


@_kind
def truncated(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    whole = _encode(body)
    cut = whole[: rng.randrange(1, len(whole))]
    return Request("truncated", path, _NO_JSON, cut)


@_kind
def trailing(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    more = rng.choice([b"}", b"x", b"{}", b",", b"\0", b" 1"])
    return Request("trailing", path, _NO_JSON + "Extra data at character", _encode(body) + more)


@_kind
def garbage(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    noise = b"\x80" + rng.randbytes(rng.randrange(1, 300))
    return Request("garbage", path, _NO_JSON + "it is not UTF-8: byte 0 is 0x80", noise)


@_kind
def encoding(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    text = json.dumps(body | {"user": "é"}, ensure_ascii=False)
    name = rng.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "utf-8-sig"])
    content_type = rng.choice([JSON, f"{JSON}; charset={name}"])
    return Request("encoding", path, _NO_JSON, text.encode(name), content_type)


@_kind
def control_bytes(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    whole = _encode(body)
    at = rng.randrange(1, len(whole) - 1)
    while whole[at] & 0xC0 == 0x80 or whole[at - 1 : at] == b"\\":
        at += 1
    byte = bytes([rng.choice([0, 0, 0, 1, 7, 27])])
    return Request("control_bytes", path, _NO_JSON, whole[:at] + byte + whole[at:])


@_kind
def huge_number(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    number = rng.choice(
        ["1e999", "-1e400", "9" * 5000, "-" + "7" * 20_000, "1" * 400 + ".5", "1e" + "9" * 40]
    )
    return Request("huge_number", path, _NO_JSON + ".*(too large)", _nest(rng, body, number))


@_kind
def no_number(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    number = rng.choice(["NaN", "Infinity", "-Infinity", "+1", "01", "0x10", ".5", "1.", "- 1", "1_000"])
    return Request("no_number", path, _NO_JSON, _nest(rng, body, number))


@_kind
def deep(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    depth = rng.choice([2_000, 20_000, 200_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    return Request(
        "deep",
        path,
        "nests more than 500 levels deep",
        _nest(rng, body, opening * depth + "1" + closing * depth),
    )


@_kind
def named_twice(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    name = rng.choice(list(body))
    if rng.random() < 0.5:
        text = json.dumps(body)[:-1] + f", {json.dumps(name)}: {json.dumps(body[name])}}}"
        return Request("named_twice", path, f"the name '{name}' stands twice", text.encode())
    return Request(
        "named_twice", path, "the name 'b' stands twice", _nest(rng, body, '{"b": 1, "c": 2, "b": 1}')
    )


@_kind
def no_object(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    value = rng.choice([[], [body], "x", 7, 1.5, True, None, json.dumps(body)])
    return Request("no_object", path, "must be a JSON object", _encode(value))


@_kind
def no_body(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    return Request("no_body", path, "must be a JSON object", b"", rng.choice([JSON, None]))


@_kind
def content_type(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    kind = rng.choice(
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/png",
         "application/jsonl", "json", "text/json", "application", "*/*", "; charset=utf-8", None]
    )  # fmt: skip
    return Request("content_type", path, "Content-Type: application/json", _encode(body), kind)


@_kind
def unknown_field(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    name = rng.choice(
        ["temprature", "max_token", "a" * 300, "", "\0", "モデル", "__class__", "model.x", "Stream"]
    )
    return Request(
        "unknown_field", path, "unknown field", _encode(body | {name: rng.choice([1, "x", {}, []])})
    )


@_kind
def surrogate(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    half = rng.choice([r'"\ud800"', r'"a\udfffb"', r'"\ude00\ud83d"', r'{"\ud834": 1}'])
    return Request("surrogate", path, "unpaired surrogate|unknown field", _nest(rng, body, half))


@_kind
def chunks(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    whole = _encode(body)
    size = b"%x" % len(whole)
    coded = rng.choice(
        [b"zz\r\n" + whole, b"-5\r\n" + whole, b"5" + whole, size + b"\r\n" + whole + b"xx\r\n0\r\n\r\n",
         b"\x00\r\n", b"0x10\r\n" + whole, b"f" * 40 + b"\r\n" + whole, b" \r\n\r\n", size + b"\n\n" + whole]
    )  # fmt: skip
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {JSON}\r\ntransfer-encoding: chunked\r\n\r\n"
    return Request("chunks", path, "no valid HTTP/1.1 request", raw=head.encode() + coded)


@_kind
def head(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    whole = _encode(body)
    line = f"POST {path} HTTP/1.1\r\nhost: x\r\n"
    end = "\r\n\r\n"
    bad = rng.choice(
        [f"PO ST {path} HTTP/1.1{end}", f"POST {path} HTTP/9.9\r\nhost: x{end}",
         f"NOSUCH {path} HTTP/1.1{end}", f"POST {path}\0 HTTP/1.1{end}", "\x16\x03\x01\x02\x00\x01",
         f"{line}content-length: 5x{end}", f"{line}content-length: -1{end}", f"{line}a b: c{end}",
         f"{line}content-length: 1\r\ncontent-length: 2{end}", f"{line}x: \0{end}", f"{line}: x{end}",
         f"{line}content-length: 3\r\ntransfer-encoding: chunked{end}",
         f"{line}content-length: 99999999999999999999999999{end}"]
    )  # fmt: skip
    return Request("head", path, "no valid HTTP/1.1 request", raw=bad.encode("latin-1") + whole)


@_kind
def long_head(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    line = f"POST {path} HTTP/1.1\r\n".encode()
    many = [b"x-%d: y\r\n" % i for i in range(9_000)]
    long = rng.choice([b"x: " + b"y" * 100_000, b"".join(many)])
    return Request("long_head", path, "more than 65536 bytes", raw=line + long)


@_kind
def method(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    name = rng.choice(["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
    return Request("method", path, f"{name} {path}: Method Not Allowed", _encode(body), method=name)


@_kind
def no_such_path(rng: random.Random, path: str, body: dict[str, Any]) -> Request:
    bad = rng.choice([path + "x", path + "/%00", "/v1" + path, "//", path + "/../x", "/v1/%ff"])
    return Request("no_such_path", bad, "Not Found", _encode(body))


def _out_of_range() -> list[tuple[str, Any]]:
    values = [("temperature", -0.1), ("temperature", 1e9), ("top_p", 0), ("top_p", 1.1), ("top_k", -2)]
    values += [("seed", 2**65), ("n", 0), ("min_tokens", -1), ("timeout", 0), ("priority", 2**63)]
    values += [
        ("max_tokens", -1),
        ("max_output_tokens", 0),
        ("logit_bias", {"-1": 1}),
        ("presence_penalty", 9),
    ]
    return [
        *values,
        ("repetition_penalty", -1),
        ("stop_token_ids", [-1]),
        ("tokens", [-1]),
        ("tokens", [10**9]),
    ]


class Malformed:
    """Makes wrong requests.

    Args:
        document: the server's OpenAPI document, which says what is right.
        model: the name that requests may ask for.
    """

    def __init__(self, document: dict[str, Any], model: str):
        self._document = document
        self._bodies = {p: b | ({"model": model} if "model" in b else {}) for p, b in BODIES.items()}
        self._validators = {path: self._validator(path) for path in BODIES}

    def schema(self, path: str) -> dict[str, Any]:
        """The schema of an endpoint's bodies."""
        reference: str = self._document["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"][
            "$ref"
        ]
        found: dict[str, Any] = self._document["components"]["schemas"][reference.rpartition("/")[2]]
        return found

    def _validator(self, path: str) -> Draft202012Validator:
        return Draft202012Validator(self.schema(path) | {"components": self._document["components"]})

    def _wrong_type(self, rng: random.Random, path: str) -> Request:
        values = [
            True,
            -3,
            2.5,
            "text",
            [],
            [[]],
            {},
            {"a": 1},
            [1],
            ["x"],
            [None],
            "",
            10**30,
            [{}],
            "1",
            "true",
        ]
        schema, valid = self.schema(path), self._bodies[path]
        while True:
            name, value = rng.choice(list(schema["properties"])), rng.choice(values)
            if not self._validators[path].is_valid(valid | {name: value}):
                return Request("wrong_type", path, name, _encode(valid | {name: value}))

    def _missing(self, rng: random.Random, path: str) -> Request:
        name = rng.choice(self.schema(path).get("required") or ["prompt"])
        rest = {key: value for key, value in self._bodies[path].items() if key != name}
        rest |= {name: None} if rng.random() < 0.3 else {}
        return Request("missing", path, name, _encode(rest))

    def _range(self, rng: random.Random, path: str) -> Request:
        known = self.schema(path)["properties"]
        usable = [(name, value) for name, value in _out_of_range() if name in known]
        if not usable:
            return self._wrong_type(rng, path)
        name, value = rng.choice(usable)
        return Request("range", path, name, _encode(self._bodies[path] | {name: value}))

    def requests(self, seed: int, count: int) -> Iterator[Request]:
        """``count`` requests, of all kinds for all endpoints in turn."""
        rng = random.Random(seed)
        own = (self._wrong_type, self._missing, self._range)
        for i in range(count):
            path = list(BODIES)[i % len(BODIES)]
            kind = (i // len(BODIES)) % (len(_MAKERS) + 2 * len(own))
            if kind < len(_MAKERS):
                yield list(_MAKERS.values())[kind](rng, path, self._bodies[path])
            else:
                yield own[kind % len(own)](rng, path)
