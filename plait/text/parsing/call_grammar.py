"""Tool calls as grammars: the counterpart of the tables that read them.

What a grammar lets a model write, the parser of the same format reads as a call of one of the tools, with
arguments that its schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.text.parsing.calls import kinds_of, resolve
from plait.text.parsing.formats import tool_format
from plait.text.structure import inline, of_lark, quoted

ANY_OBJECT = {"type": "object"}
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""Keywords that ask for nothing."""
_OBJECT = _NOTES | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id",
}  # fmt: skip
_VALUE_ENDS = ("</parameter>", "\n<parameter=", "</tool_call>")
_MOST_LENGTH = 128
"""Longest text whose length is counted where that is only a hint: each character makes the grammar larger."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. ``strict``: what of its schema cannot be kept is an error."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class _Layout:
    """How calls are written: ``begin call between call ... end``; a call is ``head arguments tail``."""

    head: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    tagged: bool = False
    """parameters one by one between tags, instead of JSON"""


_LAYOUTS = {
    "hermes": _Layout('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": _Layout('{"name": "%s", "parameters": ', "}", "; "),
    "mistral": _Layout('{"name": "%s", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
    "qwen3_coder": _Layout(
        "<tool_call>\n<function=%s>\n", "</function>\n</tool_call>", "\n", tagged=True
    ),
}  # fmt: skip
_MISTRAL_11 = _Layout("[TOOL_CALLS]%s[ARGS]", "", "")


class CallGrammar:
    """Grammars of answers that are calls, or may be.

    Args:
        tools: name of the format of calls.
        template: source of the chat template.
        tag_ids: tags that are special tokens, to their ids.
        holds: whether a grammar can be compiled; asked for schemas that are not strict, which otherwise give
            way to any object.
    """

    def __init__(
        self, tools: str, template: str, tag_ids: Mapping[str, int], holds: Callable[[str], bool]
    ) -> None:
        self._form = tool_format(tools)
        self._layout = _LAYOUTS[tools]
        if tools == "mistral" and "[ARGS]" in template:
            self._layout = _MISTRAL_11
        self._tag_ids = tag_ids
        self._holds = holds
        self._rules: list[str] = []

    def forced(self, functions: Sequence[Function], forced: str, parallel: bool) -> str:
        """Answers to a prompt that ends in ``forced``, the beginning of a call.

        Raises:
            ValueError: a strict function with a schema that cannot be kept.
        """
        return self._lark(self._calls(functions, forced, parallel))

    def free(self, functions: Sequence[Function], parallel: bool, content: Any = None) -> str:
        """Answers that are calls, or text, or (``content`` is a schema) JSON; calls may follow text.

        Raises:
            ValueError: a strict function with a schema that cannot be kept, or content that is no schema.
        """
        if content is not None:
            self._rules.append(f"content: {inline(content)}")
            return self._lark(f"content | {self._calls(functions, '', parallel)}")
        texts = [tag for tag in self._form.openings if tag not in self._tag_ids]
        first = (self._layout.begin + self._layout.head).partition("%s")[0]
        opening = next((tag for tag in texts if first.startswith(tag)), "")
        bars = [_holding(texts)] if texts else []
        if self._form.at_start:  # a call there is no call anywhere else
            bars.append(rf"/(?s:\s*({'|'.join(map(_escaped, self._form.at_start))}).*)/")
        self._rules.append("PLAIN: " + " & ~".join(["/(?s:.+)/", *bars]))
        calls = self._calls(functions, opening, parallel)
        if opening:
            self._rules.append(f"BEFORE: PLAIN? {quoted(opening)}")
            return self._lark(f"PLAIN? | BEFORE {calls}")
        before = "" if self._form.at_start else "PLAIN? "
        return self._lark(f"PLAIN? | {before}{calls}")

    def _lark(self, start: str) -> str:
        return of_lark("\n".join([f"start: {start}", *self._rules]) + "\n")

    def _calls(self, functions: Sequence[Function], known: str, parallel: bool) -> str:
        """One call or several, without ``known``, with which they begin."""
        layout, first, later = self._layout, [], []
        for i, function in enumerate(functions):
            self._rules.append(f"arguments{i}: {self._arguments(function, i)}")
            head, tail = layout.head.replace("%s", function.name), self._literal(layout.tail)
            opening = layout.begin + head
            if opening.startswith(known):
                first.append(f"{self._literal(opening[len(known) :])} arguments{i} {tail}")
            later.append(f"{self._literal(head)} arguments{i} {tail}")
        more = f" ({self._literal(layout.between)} ({' | '.join(later)}))*" if parallel else ""
        return f"({' | '.join(first)}){more} {self._literal(layout.end)}"

    def _literal(self, text: str) -> str:
        """A text in which some tags are special tokens."""
        if not self._tag_ids:
            return quoted(text) if text else ""
        parts = re.split(f"({'|'.join(map(re.escape, self._tag_ids))})", text)
        return " ".join(f"<[{self._tag_ids[p]}]>" if p in self._tag_ids else quoted(p) for p in parts if p)

    # -- arguments --------------------------------------------------------------------------

    def _arguments(self, function: Function, number: int) -> str:
        schema = function.parameters or ANY_OBJECT
        if self._layout.tagged:
            return self._parameters(function, schema, number)
        return self._json(schema, function.strict)

    def _json(self, schema: Mapping[str, Any], strict: bool) -> str:
        if strict:
            return inline(schema)
        try:
            rule = inline(schema, lenient=True)
        except ValueError:
            return inline(ANY_OBJECT)
        return rule if self._holds(of_lark(f"start: {rule}")) else inline(ANY_OBJECT)

    def _parameters(self, function: Function, schema: Mapping[str, Any], number: int) -> str:
        """Parameters between tags, in the order of the schema."""
        name, properties = function.name, schema.get("properties") or {}
        required = schema.get("required") or []
        if function.strict:
            if unkept := schema.keys() - _OBJECT:
                raise ValueError(f"{name}: {min(unkept)} cannot be kept in this model's format of calls")
            if missing := set(required) - set(properties):
                raise ValueError(f"{name}: {min(missing)} is required, and no property")
        parts = []
        for i, (key, value) in enumerate(properties.items()):
            if not key or key != key.strip() or re.search("[>\n]", key):
                if function.strict or key in required:
                    raise ValueError(f"{name}: a parameter cannot be called {key!r}")
                continue
            rule = f"value{number}x{i}"
            self._value(rule, f"{name}.{key}", value, schema, function.strict)
            part = f"({quoted(f'<parameter={key}>' + chr(10))} {rule})"
            parts.append(part if key in required else part + "?")
        return " ".join(parts) or '""'

    def _value(self, rule: str, where: str, schema: Any, root: Mapping[str, Any], strict: bool) -> None:
        """The rule of a value up to the end of its closing tag."""
        schema = resolve(schema, root)
        kinds = kinds_of(schema, root)
        end = quoted("\n</parameter>\n")
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values and all(isinstance(v, str) for v in values):
            plain = [v for v in values if not any(tag in v for tag in _VALUE_ENDS)]
            if len(plain) < len(values) and (strict or not plain):
                raise ValueError(f"{where}: a value holds a tag of this model's format of calls")
            self._rules.append(f"{rule}: ({' | '.join(quoted(v) for v in plain)}) {end}")
        elif kinds and "string" not in kinds:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            self._rules.append(f"{rule}: {self._json({**schema, **shared}, strict)} {end}")
        else:
            text = rule.upper()
            self._rules.append(f"{rule}: {text}")
            self._rules.append(f"{text}: {text}TEXT {end}")
            self._rules.append(f"{text}TEXT: {self._text(where, schema, strict)} & ~{_holding(_VALUE_ENDS)}")

    @staticmethod
    def _text(where: str, schema: Mapping[str, Any], strict: bool) -> str:
        """A regular expression of the texts that a schema of strings allows."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not strict and any(isinstance(n, int) and n > _MOST_LENGTH for n in (least, most)):
            least, most = 0, ""
        if strict and (unkept := schema.keys() - _NOTES - {"type", "minLength", "maxLength"}):
            raise ValueError(f"{where}: {min(unkept)} cannot be kept in this model's format of calls")
        if strict and not (schema.get("type") in (None, "string") or least == 0 == len(str(most))):
            raise ValueError(f"{where}: lengths cannot be kept beside several types")
        return f"/(?s:.{{{least},{most}}})/"


def _holding(tags: Sequence[str]) -> str:
    """A regular expression of the texts that hold one of ``tags``."""
    return f"/(?s:.*)({'|'.join(map(_escaped, tags))})(?s:.*)/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")  # re.escape puts a backslash before it
