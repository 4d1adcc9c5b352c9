"""One JSON value, checked and passed on character by character.

A table of states with a stack of open brackets. What comes out is strict JSON at every moment, that is, the
beginning of some valid text: two things that models write and JSON forbids are mended on the way, control
characters inside strings (escaped) and Python's ``True``, ``False`` and ``None``.
"""

from __future__ import annotations

import json
import re

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_WORDS = {w: w for w in ("true", "false", "null")} | {"True": "true", "False": "false", "None": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_MOST_DEPTH = 256
"""Deeper nesting is a fault: readers of JSON give up not much later."""
_MOST_SCALAR = 400
"""A longer number is a fault: no reader would keep its digits."""

# What may come next, outside of strings and scalars.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _MORE, _END = range(7)


class JsonValue:
    """Reads one value. After each ``feed``, ``done`` or ``fault`` may have become true.

    Attributes:
        done: the value is complete.
        fault: the text is no JSON; nothing more is taken.
        text: all that came out so far, if ``keep`` was set.
    """

    def __init__(self, keep: bool = False) -> None:
        self.done = False
        self.fault = False
        self._keep = keep
        self._parts: list[str] = []
        self._stack: list[str] = []
        self._next = _VALUE
        self._in_string = False
        self._escape = ""
        """an escape sequence that is not complete yet"""
        self._scalar = ""
        self._key = False
        """the string under way is a key"""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, text: str) -> tuple[int, str]:
        """Read on. Returns the number of characters taken, and what comes out."""
        out: list[str] = []
        at = 0
        while at < len(text) and not (self.done or self.fault):
            if self._in_string:
                at = self._string(text, at, out)
            elif self._scalar or (self._next in (_VALUE, _FIRST_ITEM) and _SCALAR.match(text[at])):
                at = self._read_scalar(text, at, out)
            else:
                at = self._structure(text, at, out)
        shown = "".join(out)
        if self._keep:
            self._parts.append(shown)
        return at, shown

    def close(self) -> str:
        """What is missing, where that is closing brackets alone; the value is then done. Else nothing."""
        out: list[str] = []
        if self._scalar and self._stack:
            self._end_scalar(out)
        if self.done or self.fault or self._in_string or self._scalar or not self._stack:
            return ""
        if self._next not in (_MORE, _FIRST_ITEM, _FIRST_KEY):
            return ""
        self.done = True
        closing = "".join(out) + "".join("}" if b == "{" else "]" for b in reversed(self._stack))
        if self._keep:
            self._parts.append(closing)
        return closing

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._escape:
            return self._in_escape(text, at, out)
        if found := _PLAIN.match(text, at):
            out.append(found[0])
            return found.end()
        char = text[at]
        if char == '"':
            out.append(char)
            self._in_string = False
            if self._key:
                self._next = _COLON
            else:
                self._after_value()
        elif char == "\\":
            self._escape = char
        else:
            out.append(json.dumps(char)[1:-1])
        return at + 1

    def _in_escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        escape = self._escape + char
        if len(escape) == 2 and char in '"\\/bfnrt':
            out.append(escape)
            self._escape = ""
        elif (len(escape) == 2 and char == "u") or (len(escape) > 2 and char in _HEX):
            self._escape = escape
            if len(escape) == 6:
                out.append(escape)
                self._escape = ""
        else:
            self.fault = True
            return at
        return at + 1

    def _read_scalar(self, text: str, at: int, out: list[str]) -> int:
        found = _SCALAR.match(text, at)
        if found is not None:
            self._scalar += found[0]
            if len(self._scalar) > _MOST_SCALAR:
                self.fault = True
                return at
            return found.end()
        self._end_scalar(out)
        return at

    def _end_scalar(self, out: list[str]) -> None:
        scalar, self._scalar = self._scalar, ""
        if scalar in _WORDS:
            out.append(_WORDS[scalar])
        elif _NUMBER.fullmatch(scalar):
            out.append(scalar)
        else:
            self.fault = True
            return
        self._after_value()

    def _after_value(self) -> None:
        if self._stack:
            self._next = _MORE
        else:
            self._next = _END
            self.done = True

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        char, want = text[at], self._next
        if char in _SPACE:
            pass
        elif char == '"' and want in (_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY):
            self._in_string = True
            self._key = want in (_FIRST_KEY, _KEY)
        elif char in "{[" and want in (_VALUE, _FIRST_ITEM) and len(self._stack) < _MOST_DEPTH:
            self._stack.append(char)
            self._next = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char == ":" and want == _COLON:
            self._next = _VALUE
        elif char == "," and want == _MORE:
            self._next = _KEY if self._stack[-1] == "{" else _VALUE
        elif (char == "}" and self._closes("{", _FIRST_KEY)) or (
            char == "]" and self._closes("[", _FIRST_ITEM)
        ):
            self._stack.pop()
            self._after_value()
        else:
            self.fault = True
            return at
        out.append(char)
        return at + 1

    def _closes(self, bracket: str, empty: int) -> bool:
        return bool(self._stack) and self._stack[-1] == bracket and self._next in (_MORE, empty)
