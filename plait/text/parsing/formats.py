"""The formats in which models write reasoning and tool calls, as tables of states; and which one a model
writes, as its chat template shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from plait.text.parsing.states import FAULT, Act, Kind, Move, State, Table, check

States = dict[str, State]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Args:
    open, close: tags around the reasoning.
    begins_inside: an answer begins with reasoning even where the prompt does not end in ``open``.
    calls_end_it: a tool call ends the reasoning without ``close``.
    """

    open: str = "<think>"
    close: str = "</think>"
    begins_inside: bool = False
    calls_end_it: bool = True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Args:
    openings: tags that lead from plain text into a call.
    states: of the calls; "content" is plain text.
    at_start: tags that open a call only where an answer begins.
    forced: text that a prompt ends in, so that the answer is a call; ``{name}`` if the function is given.
    id_length: letters and digits of a call's id, where templates insist; 0: ``call_`` and 24.
    """

    openings: Mapping[str, Move]
    states: Mapping[str, State]
    at_start: Mapping[str, Move]
    forced_any: str
    forced: str
    id_length: int = 0


REASONING: dict[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(begins_inside=True, calls_end_it=False),
}


def _qwen3_coder() -> ToolFormat:
    """``<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>...</function>\\n</tool_call>``.

    Models forget ``<tool_call>`` and ``</parameter>``. A value is also ended by the next parameter at the
    start of a line, and by the end of the whole call; ``</function>`` alone may stand in a value.
    """
    call = Move("call", Act.OPEN)
    bare = Move("bare name", Act.OPEN)
    key = {"<parameter=": Move("key")}
    ends = {
        "</function>": Move("called", Act.END),
        "</tool_call>": Move("after", Act.END),
        "<tool_call>": Move("call", Act.NEXT),
        "<function=": Move("bare name", Act.NEXT),
    }
    value_ends = {
        "</parameter>": Move("parameters", Act.VALUE),
        "\n<parameter=": Move("key", Act.VALUE),
        "</function>\n</tool_call>": Move("after", Act.END),
        "</function></tool_call>": Move("after", Act.END),
        "</tool_call>": Move("after", Act.END),
    }
    name = {">": Move("parameters", Act.NAME)}
    return ToolFormat(
        openings={"<tool_call>": call, "<function=": bare},
        states={
            "call": State(Kind.GAP, {"<function=": Move("name"), "{": Move("json", keep=True)}, then=FAULT),
            "json": State(Kind.CALL, then="called"),  # as older models of the family write it
            "name": State(Kind.NAME, name),
            "bare name": State(Kind.NAME, name, known=True),
            "parameters": State(Kind.DROP, key | ends),
            "key": State(Kind.KEY, {">": Move("value", Act.KEY), "\n": Move("value", Act.KEY)}),
            "value": State(Kind.VALUE, value_ends),
            "called": State(Kind.LEAD, {"</tool_call>": Move("after"), "<tool_call>": call}, then="after"),
            "after": State(Kind.LEAD, {"<tool_call>": call, "<function=": bare}),
        },
        at_start={},
        forced_any="<tool_call>\n<function=",
        forced="<tool_call>\n<function={name}>\n",
    )


def _hermes() -> ToolFormat:
    """``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``"""
    call = Move("call", Act.OPEN)
    return ToolFormat(
        openings={"<tool_call>": call},
        states={
            "call": State(Kind.CALL, then="called"),
            "called": State(Kind.LEAD, {"</tool_call>": Move("after"), "<tool_call>": call}),
            "after": State(Kind.LEAD, {"<tool_call>": call}),
        },
        at_start={},
        forced_any='<tool_call>\n{"name": "',
        forced='<tool_call>\n{{"name": "{name}", "arguments": ',
    )


def _llama3_json() -> ToolFormat:
    """``{"name": ..., "parameters": {...}}``, which is the whole answer, or follows ``<|python_tag|>``;
    several are parted by semicolons."""
    brace = Move("call", Act.OPEN, keep=True)
    tag = Move("tagged", Act.OPEN)
    return ToolFormat(
        openings={"<|python_tag|>": tag},
        states={
            "tagged": State(Kind.GAP, {"{": Move("call", keep=True)}, then=FAULT),
            "call": State(Kind.CALL, then="called", known=True),
            "called": State(Kind.LEAD, {";": Move("next", Act.OPEN), "<|python_tag|>": tag, "{": brace}),
            "next": State(Kind.GAP, {"{": Move("call", keep=True), "<|python_tag|>": Move("tagged")}, FAULT),
        },
        at_start={"{": brace},
        forced_any='{"name": "',
        forced='{{"name": "{name}", "parameters": ',
    )


def _mistral() -> ToolFormat:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or, from the eleventh tokenizer on,
    ``[TOOL_CALLS]NAME[ARGS]{...}`` for each call, ``[ARGS]`` and a ``[CALL_ID]`` before it being optional."""
    opened = Move("opened", Act.OPEN)
    item = Move("item", keep=True)
    arguments = {
        "[ARGS]": Move("arguments", Act.NAME),
        "{": Move("arguments", Act.NAME, keep=True),
    }
    return ToolFormat(
        openings={"[TOOL_CALLS]": opened},
        states={
            "opened": State(Kind.GAP, {"[": Move("first item"), "{": item}, then="name"),
            "first item": State(Kind.GAP, {"{": item}, then=FAULT),
            "item": State(Kind.CALL, then="items"),
            "items": State(
                Kind.LEAD,
                {",": Move("next item", Act.OPEN), "]": Move("after"), "[TOOL_CALLS]": opened},
            ),
            "next item": State(Kind.GAP, {"{": item}, then=FAULT),
            "name": State(Kind.NAME, {**arguments, "[CALL_ID]": Move("id", Act.NAME)}),
            "id": State(Kind.DROP, {"[ARGS]": Move("arguments"), "{": Move("arguments", keep=True)}),
            "arguments": State(Kind.ARGUMENTS, then="after"),
            "after": State(Kind.LEAD, {"[TOOL_CALLS]": opened}),
        },
        at_start={},
        forced_any="[TOOL_CALLS]",
        forced='[TOOL_CALLS][{{"name": "{name}", "arguments": ',
        id_length=9,
    )


_TOOLS: dict[str, Callable[[], ToolFormat]] = {
    "qwen3_coder": _qwen3_coder,
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
TOOL_PARSERS = tuple(_TOOLS)
REASONING_PARSERS = tuple(REASONING)


@cache
def tool_format(name: str) -> ToolFormat:
    return _TOOLS[name]()


@cache
def table(reasoning: str | None, tools: str | None) -> Table:
    """The states of an answer with this reasoning and these calls; None: there are none.

    An answer begins in "start", or, where the prompt ends inside the reasoning, in "reasoning".
    """
    calls = tool_format(tools) if tools else None
    openings = dict(calls.openings) if calls else {}
    at_start = dict(calls.at_start) if calls else {}
    states: States = dict(calls.states) if calls else {}
    content = dict(openings)
    lead = openings | at_start
    if reasoning:
        form = REASONING[reasoning]
        content[form.close] = Move("content")  # a second one: dropped
        inside = {form.open: Move("reasoning"), form.close: Move("answer")}
        if form.calls_end_it:
            inside |= openings
        states["reasoning"] = State(Kind.REASONING, inside)
        states["answer"] = State(Kind.GAP, {form.close: Move("answer"), **lead})
        lead = {**lead, form.open: Move("reasoning"), form.close: Move("answer")}
    states["content"] = State(Kind.CONTENT, content)
    states["start"] = State(Kind.LEAD, lead)
    states["over"] = State(Kind.DROP)
    check(states)
    return states


def forced_text(tools: str, name: str | None, template: str) -> str:
    """What a prompt must end in for the answer to be a call, of the function ``name`` if it is given."""
    form = tool_format(tools)
    if name is None:
        return form.forced_any
    if tools == "mistral" and "[ARGS]" in template:
        return f"[TOOL_CALLS]{name}[ARGS]"
    return form.forced.format(name=name)


def reasoning_of(template: str) -> str | None:
    """The reasoning format that a chat template speaks, or None."""
    if "</think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def tools_of(template: str) -> str | None:
    """The format of tool calls that a chat template speaks, or None."""
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    return None
