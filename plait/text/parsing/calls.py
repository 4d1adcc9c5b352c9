"""Tool calls under way: what turns their text into events, in the two forms that models write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from plait.text.parsing.events import CallArguments, CallBegin, CallEnd, Event
from plait.text.parsing.json_value import JsonValue

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,350})(\.[0-9]{1,350})?([eE][+-]?[0-9]{1,20})?")
_BOOLEANS = {"true": "true", "false": "false"}
_NULLS = ("null", "none")
_MOST_REFERENCES = 8


def kinds_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """JSON types that a JSON schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return kinds_of(_resolve(reference, root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            return frozenset().union(*(kinds_of(option, root, depth + 1) for option in options))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_kind_of_value(value) for value in values)
    return frozenset()


def resolve(schema: Any, root: Any) -> Mapping[str, Any]:
    """A schema, or what it refers to within ``root``; an empty one where there is none."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = _resolve(reference, root)
    return schema if isinstance(schema, Mapping) else {}


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _kind_of_value(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def coerced(text: str, kinds: frozenset[str]) -> str:
    """``text``, written as plain text by a model, as the JSON of a value of one of ``kinds``.

    What fits none of them is a string: the tool's own check says more about it than a guess would.
    """
    plain = text.strip()
    if "null" in kinds and plain.lower() in _NULLS:
        return "null"
    if "boolean" in kinds and plain.lower() in _BOOLEANS:
        return _BOOLEANS[plain.lower()]
    if kinds & {"integer", "number"} and _NUMBER.fullmatch(plain):
        return plain
    if ("object" in kinds and plain.startswith("{")) or ("array" in kinds and plain.startswith("[")):
        value = JsonValue()
        count, out = value.feed(plain)
        if value.done and count == len(plain):
            return out
    return json.dumps(text, ensure_ascii=False)


class ParameterCall:
    """A call whose parameters are written one by one, as plain text between tags.

    A string grows as its text does. Any other value waits until it is whole, since only then is it known
    to be what the tool's schema asks for. One newline on each side of a value is the format's own.

    Args:
        index: of the call in the answer.
        name: of the function.
        parameters: JSON schema of its arguments, or None.
    """

    def __init__(self, index: int, name: str, parameters: Any) -> None:
        self._index = index
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        self._schemas: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._root = parameters
        self._count = 0
        self._kinds: frozenset[str] | None = None
        """of the value under way; None between values"""
        self._whole: list[str] = []
        self._at_front = True
        self._newline = ""
        self.events: list[Event] = [CallBegin(index, name)]
        self._emit("{")

    def _emit(self, text: str) -> None:
        if text:
            self.events.append(CallArguments(self._index, text))

    @property
    def _streams(self) -> bool:
        return self._kinds is not None and self._kinds <= {"string"}

    def key(self, name: str) -> None:
        """A value begins."""
        self._emit((", " if self._count else "") + json.dumps(name, ensure_ascii=False) + ": ")
        self._count += 1
        self._kinds = kinds_of(self._schemas.get(name), self._root)
        self._whole = []
        self._at_front = True
        self._newline = ""
        if self._streams:
            self._emit('"')

    def text(self, text: str) -> None:
        """More of the value."""
        if self._at_front and text:
            self._at_front = False
            text = text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        if self._newline:
            text = text[:-1]
        if self._streams:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._whole.append(text)

    def end_value(self) -> None:
        if self._kinds is None:
            return
        self._emit('"' if self._streams else coerced("".join(self._whole), self._kinds))
        self._kinds = None

    def end(self) -> None:
        self.end_value()
        self._emit("}")
        self.events.append(CallEnd(self._index))


class JsonCall:
    """A call written as JSON: ``{"name": ..., "arguments": {...}}``, or the arguments alone.

    Keys may come in any order; ``parameters`` is another name for ``arguments``; other keys are passed over.
    Arguments that are a string which holds an object (some models quote twice) become that object.

    Args:
        index: of the call in the answer.
        known: if given, names that a call may have; one with another is a fault.
        name: given where the text is the arguments alone.
    """

    def __init__(self, index: int, known: Mapping[str, Any] | None = None, name: str | None = None) -> None:
        self.done = False
        self.fault = False
        self.events: list[Event] = []
        self._index = index
        self._known = known
        self._name = name
        self._key = ""
        self._value: JsonValue | None = None
        self._arguments: JsonValue | None = None
        self._streams = False
        self._waiting: list[str] = []
        """arguments that came before the name"""
        self._want = "{"
        """what may come next in the outer object: its brace, a key, a colon, a value, or more"""
        self._bare = name is not None
        """there is no object around the arguments"""
        if name is not None:
            self._begin(name)
            self._want = "value"
            self._key = "arguments"

    @property
    def begun(self) -> bool:
        return self._name is not None

    def _begin(self, name: str) -> None:
        self._name = name
        self.events.append(CallBegin(self._index, name))
        self._emit("".join(self._waiting))
        self._waiting = []

    def _emit(self, text: str) -> None:
        if not self.begun:
            self._waiting.append(text)
        elif text:
            self.events.append(CallArguments(self._index, text))

    def feed(self, text: str) -> int:
        """Read on; the number of characters taken."""
        at = 0
        while at < len(text) and not (self.done or self.fault):
            if self._value is not None:
                at += self._in_value(self._value, text[at:] if at else text)
            elif text[at] in " \t\r\n":
                at += 1
            else:
                at = self._outer(text, at)
        return at

    def _outer(self, text: str, at: int) -> int:
        char, want = text[at], self._want
        if want == "value":
            self._start_value(char)
            return at
        if want in ("key", "first key") and char == '"':
            self._value = JsonValue(keep=True)
            return at
        if char == "}" and want in ("more", "first key"):
            self._end()
        else:
            follows = {("{", "{"): "first key", (":", ":"): "value", ("more", ","): "key"}.get((want, char))
            if follows is None:
                self.fault = True
                return at
            self._want = follows
        return at if self.fault else at + 1

    def _start_value(self, char: str) -> None:
        arguments = self._key in ("arguments", "parameters")
        if arguments and self._arguments is not None:
            self.fault = True  # given twice
            return
        self._streams = arguments and char == "{"
        self._value = JsonValue(keep=not self._streams)
        if arguments:
            self._arguments = self._value

    def _in_value(self, value: JsonValue, text: str) -> int:
        count, out = value.feed(text)
        if self._streams:
            self._emit(out)
        if value.fault:
            self.fault = True
        elif value.done:
            self._value = None
            self._streams = False
            self._took(value)
        return count

    def _took(self, value: JsonValue) -> None:
        """A key or a value is whole."""
        if self._want != "value":
            self._key, self._want = json.loads(value.text), ":"
            return
        self._want = "more"
        if value is self._arguments:
            self._take_arguments(value)
        elif self._key == "name":
            self._take_name(value)

    def _take_name(self, value: JsonValue) -> None:
        name = json.loads(value.text)
        allowed = self._known is None or (isinstance(name, str) and name in self._known)
        if self.begun or not isinstance(name, str) or not name or not allowed:
            self.fault = True
        else:
            self._begin(name)

    def _take_arguments(self, value: JsonValue) -> None:
        """Arguments that did not stream are null, or an object in quotes."""
        if value.text:
            inner = JsonValue(keep=True)
            content = json.loads(value.text)
            if isinstance(content, str) and content.lstrip()[:1] == "{":
                count, out = inner.feed(content)
                if not inner.done or content[count:].strip():
                    self.fault = True
                self._emit("" if self.fault else out)
            elif content is None or content == "":
                self._emit("{}")
            else:
                self.fault = True
        if self._bare and not self.fault:
            self._end()

    def _end(self) -> None:
        if not self.begun:
            self.fault = True
            return
        if self._arguments is None:
            self._emit("{}")
        self.done = True
        self.events.append(CallEnd(self._index))

    def close(self) -> None:
        """The answer ended by itself. Where closing brackets alone are missing they are added."""
        if self.done or self.fault or not self.begun:
            return
        if self._value is not None:
            if self._value is not self._arguments or not self._streams:
                return
            closing = self._value.close()
            if not closing:
                return
            self._emit(closing)
            self._want = "more"
        if self._want == "more":
            self._end()
