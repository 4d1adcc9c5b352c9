"""Reasoning and tool calls out of text: the formats as models write them, well and badly, cut anywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.text.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from plait.text.parsing.calls import coerced, kinds_of
from plait.text.parsing.formats import forced_text, reasoning_of, table, tool_format, tools_of
from plait.text.parsing.json_value import JsonValue

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "metric": {"type": "boolean"},
            "options": {"type": "object"},
            "places": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"$ref": "#/$defs/unit"},
        },
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
    "now": {"type": "object", "properties": {}},
}


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """What a client puts together from a stream."""
    calls: dict[int, list[Any]] = {}
    for event in events:
        match event:
            case CallBegin(index, name):
                assert index == len(calls)
                calls[index] = [name, "", False]
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert not calls[index][2]
                assert text
                calls[index][1] += text
            case CallEnd(index):
                calls[index][2] = True
    return {
        "reasoning": "".join(e.text for e in events if isinstance(e, Reasoning)),
        "content": "".join(e.text for e in events if isinstance(e, Content)),
        "calls": [tuple(call) for call in calls.values()],
    }


def parse(
    text: str,
    tools: str | None,
    reasoning: str | None = None,
    *,
    start: str = "start",
    cuts: Sequence[int] = (),
    reason: str = "stop",
    parallel: bool = True,
) -> dict[str, Any]:
    parser = OutputParser(table(reasoning, tools), start, TOOLS, parallel=parallel)
    events: list[Event] = []
    for a, b in itertools.pairwise([0, *sorted(cuts), len(text)]):
        events += parser.feed(text[a:b])
    return summary([*events, *parser.finish(reason)])


def call(name: str, *, whole: bool = True, **arguments: Any) -> tuple[str, Any, bool]:
    return (name, arguments, whole)


def decoded(found: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    return [(name, json.loads(arguments), whole) for name, arguments, whole in found["calls"]]


CODER = (
    'Let me look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSão "Paulo"\n\n<b>\n</parameter>\n'
    '<parameter=days>\n3\n</parameter>\n<parameter=options>\n{"a": {"b": [1, "x\\n", null]}}\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>\nThat is all."
)
HERMES = (
    'Text.\n<tool_call>\n{"name": "weather", "arguments": {"city": "a\\"b\\n</tool_call>", "days": -1.5e3, '
    '"options": {"deep": [[], {}, [true, null]]}}}\n</tool_call>\n<tool_call>\n'
    '{"arguments": {}, "name": "now"}'
    "\n</tool_call>\nMore."
)
LLAMA = (
    '{"name": "weather", "parameters": {"city": "{\\"x\\"}", "days": 2}}; {"name": "now", "parameters": {}}'
)
MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "[1]"}}, {"name": "now", "arguments": {}}]'
MISTRAL_NEW = 'Hm.[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{"city": "{"}[TOOL_CALLS]now{}'

WELL_FORMED: list[tuple[str, str, str, list[Any]]] = [
    (
        "qwen3_coder",
        CODER,
        "Let me look.\nThat is all.",
        [
            call("weather", city='São "Paulo"\n\n<b>', days=3, options={"a": {"b": [1, "x\n", None]}}),
            call("now"),
        ],
    ),
    (
        "hermes",
        HERMES,
        "Text.\nMore.",
        [
            call("weather", city='a"b\n</tool_call>', days=-1500.0, options={"deep": [[], {}, [True, None]]}),
            call("now"),
        ],
    ),
    ("llama3_json", LLAMA, "", [call("weather", city='{"x"}', days=2), call("now")]),
    (
        "llama3_json",
        "Hm. <|python_tag|>" + LLAMA,
        "Hm.",
        [call("weather", city='{"x"}', days=2), call("now")],
    ),
    ("mistral", MISTRAL, "", [call("weather", city="[1]"), call("now")]),
    ("mistral", MISTRAL_NEW, "Hm.", [call("weather", city="{"), call("now")]),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), WELL_FORMED)
def test_calls_cut_at_every_place(tools: str, text: str, content: str, calls: list[Any]) -> None:
    whole = parse(text, tools)
    assert whole["content"] == content
    assert decoded(whole) == calls
    for cut in range(len(text) + 1):
        assert parse(text, tools, cuts=[cut]) == whole
    assert parse(text, tools, cuts=range(len(text))) == whole


@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
@pytest.mark.parametrize(("tools", "text", "content", "calls"), WELL_FORMED)
def test_reasoning_before_calls(
    reasoning: str, tools: str, text: str, content: str, calls: list[Any]
) -> None:
    for begin, start in (("", "reasoning"), ("<think>\n", "start"), ("<think>\n", "reasoning")):
        thought = begin + 'I  should\n\ncall "weather".\n</think>\n\n'
        whole = parse(thought + text, tools, reasoning, start=start)
        assert whole["reasoning"] == 'I  should\n\ncall "weather".'
        assert whole["content"] == content
        assert decoded(whole) == calls
        assert parse(thought + text, tools, reasoning, start=start, cuts=range(len(thought + text))) == whole


def test_a_call_ends_qwen3s_reasoning_but_not_deepseeks() -> None:
    text = "So I call it.\n" + CODER.partition("\n\n")[2]
    assert parse(text, "qwen3_coder", "qwen3", start="reasoning")["reasoning"] == "So I call it."
    assert len(parse(text, "qwen3_coder", "qwen3", start="reasoning")["calls"]) == 2
    assert parse(text, "qwen3_coder", "deepseek_r1", start="reasoning")["calls"] == []


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # no opening tag
        (
            "<function=weather>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>",
            [call("weather", city="A")],
        ),
        # no </parameter>, in the middle and at the end
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nA\n<parameter=days>\n4\n</function>\n</tool_call>",
            [call("weather", city="A", days=4)],
        ),
        # no </function>, no </tool_call>
        ("<tool_call>\n<function=weather>\n<parameter=city>\nA\n</parameter>", [call("weather", city="A")]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nA\n</function>", [call("weather", city="A")]),
        (
            "<tool_call><function=weather><parameter=city>A</parameter></tool_call>",
            [call("weather", city="A")],
        ),
        # the next call begins before the last has ended
        (
            "<tool_call>\n<function=now>\n<tool_call>\n<function=weather>\n<parameter=city>\nA\n</parameter>\n",
            [call("now"), call("weather", city="A")],
        ),
        # a value that holds tags of its own
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\n<a></function>\n</a>\n</parameter>\n</function>\n"
            "</tool_call>",
            [call("weather", city="<a></function>\n</a>")],
        ),
        # the format of an elder model
        (
            '<tool_call>\n{"name": "weather", "arguments": {"days": 1}}\n</tool_call>',
            [call("weather", days=1)],
        ),
        # an undeclared parameter is a string
        (
            "<tool_call>\n<function=now>\n<parameter=zone>\n5\n</parameter>\n</function>\n</tool_call>",
            [call("now", zone="5")],
        ),
    ],
)
def test_coder_calls_with_tags_missing(text: str, calls: list[Any]) -> None:
    whole = parse(text, "qwen3_coder")
    assert decoded(whole) == calls
    assert whole["content"] == ""
    assert parse(text, "qwen3_coder", cuts=range(len(text))) == whole


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("qwen3_coder", "Write <function=other> to begin, and <tool_call> before it."),
        ("qwen3_coder", "<function=we ather>"),
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'),
        ("llama3_json", '{"name": "Alice", "age": 3}'),
        ("llama3_json", '{"city": "Rome"}'),
        ("llama3_json", "[1, 2]"),
        ("mistral", "[TOOL_CALLS] well"),
        ("hermes", "  spaces around  "),
    ],
)
def test_what_is_no_call_stays_content(tools: str, text: str) -> None:
    assert parse(text, tools) == {"reasoning": "", "content": text, "calls": []}
    assert parse(text, tools, cuts=range(len(text)))["content"] == text


@pytest.mark.parametrize(("tools", "text", "content", "calls"), WELL_FORMED)
def test_a_cut_off_call_is_never_closed(tools: str, text: str, content: str, calls: list[Any]) -> None:
    """Whatever the limit cuts, no part of a call looks like a whole one."""
    whole = parse(text, tools)["calls"]
    for end in range(len(text)):
        cut = parse(text[:end], tools, reason="length")["calls"]
        assert len(cut) <= len(whole)
        for (name, arguments, ended), expected in zip(cut, whole, strict=False):
            assert expected[:2] == (name, arguments) if ended else expected[1].startswith(arguments)
            try:
                json.loads(arguments)
            except ValueError:
                continue
            assert expected[:2] == (name, arguments)


def test_brackets_that_the_model_forgot_are_added() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "A", "options": {"x": [1, 2'
    assert decoded(parse(text, "hermes")) == [call("weather", city="A", options={"x": [1, 2]})]
    [(_, arguments, whole)] = parse(text + ', "half', "hermes")["calls"]
    assert not whole
    assert arguments.endswith('"half')


def test_one_call_where_the_client_wants_one() -> None:
    for tools, text, content, calls in WELL_FORMED:
        parser = OutputParser(table(None, tools), "start", TOOLS, parallel=False)
        events = parser.feed(text)
        assert parser.over
        found = summary([*events, *parser.finish("stop")])
        assert decoded(found) == calls[:1]
        assert content.startswith(found["content"])


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize("name", [None, "weather"])
@pytest.mark.parametrize("template", ["", "[ARGS]"])
def test_a_forced_prompt_is_the_beginning_of_a_call(tools: str, name: str | None, template: str) -> None:
    bodies = {
        "qwen3_coder": "<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>",
        "mistral": '{"city": "A"}' if template and name else '{"city": "A"}}]',
    }
    rest = bodies.get(tools, '{"city": "A"}}')
    heads = {"qwen3_coder": "weather>\n", "mistral": '[{"name": "weather", "arguments": '}
    if name is None:
        key = "parameters" if tools == "llama3_json" else "arguments"
        rest = heads.get(tools, f'weather", "{key}": ') + rest
    parser = OutputParser(table(None, tools), "start", TOOLS)
    parser.prime(forced_text(tools, name, template))
    events = parser.feed(rest, tokens=list(range(len(rest))), starts=list(range(len(rest))))
    assert decoded(summary([*events, *parser.finish("stop")])) == [call("weather", city="A")]


def test_thoughts_about_calls_stay_thoughts() -> None:
    thought = 'A <tool_call> needs JSON. <tool_call>\n{"x": 1} is none, <function=other> neither.'
    for tools in ("hermes", "qwen3_coder"):
        text = thought + "\n</think>\n\nSo."
        found = parse(text, tools, "qwen3", start="reasoning")
        assert found == {"reasoning": thought, "content": "So.", "calls": []}
        assert parse(text, tools, "qwen3", start="reasoning", cuts=range(len(text))) == found
        tokens = OutputParser(table("qwen3", tools), "reasoning", TOOLS)
        feed_tokens(tokens, list(text))
        tokens.finish("stop")
        assert tokens.reasoning_tokens == len(thought) + 1


# Tokens


def feed_tokens(parser: OutputParser, pieces: Sequence[str], ids: Sequence[int] | None = None) -> list[Event]:
    ids = ids or range(len(pieces))
    starts = [0, *itertools.accumulate(map(len, pieces))]
    events: list[Event] = []
    for piece, token, start in zip(pieces, ids, starts, strict=False):
        events += parser.feed(piece, [token], [start])
    return events


def test_reasoning_tokens_are_those_between_the_tags() -> None:
    pieces = ["<think>", "\n", "so", " it", " is", "\n", "</think>", "\n\n", "Yes", "."]
    parser = OutputParser(table("qwen3", None))
    feed_tokens(parser, pieces)
    parser.finish("stop")
    assert parser.reasoning_tokens == 5
    whole = OutputParser(table("qwen3", None))
    starts = [0, *itertools.accumulate(map(len, pieces))][: len(pieces)]
    whole.feed("".join(pieces), range(len(pieces)), starts)
    whole.finish("stop")
    assert whole.reasoning_tokens == 5


def test_an_answer_that_is_all_reasoning() -> None:
    parser = OutputParser(table("qwen3", None), "reasoning")
    events = feed_tokens(parser, ["a", " b", "", "<thi"])  # one token without text; a tag that may begin
    assert summary([*events, *parser.finish("length")])["reasoning"] == "a b<thi"
    assert parser.reasoning_tokens == 4


def test_special_tokens_are_tags_by_their_id_alone() -> None:
    tags = {7: "[TOOL_CALLS]", 8: "[ARGS]"}
    pieces, ids = ["See", " [TOOL_CALLS]", ".", "[TOOL_CALLS]", "now", "[ARGS]", "{}"], [1, 2, 3, 7, 4, 8, 5]
    parser = OutputParser(table(None, "mistral"), "start", TOOLS, tags)
    found = summary([*feed_tokens(parser, pieces, ids), *parser.finish("stop")])
    assert found["content"] == "See [TOOL_CALLS]."
    assert decoded(found) == [call("now")]


# Anything at all

_PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", ">",
    "</parameter>", "<function=weather>", "<parameter=city>", "<parameter=days>", "<function=now>", "\n", " ",
    "\n\n", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";", "{", "}", "[", "]", ",", ":", '"',
    "\\", '{"name": "weather", "arguments": ', '{"name": "now", "parameters": ', '"name"', '"arguments"',
    "weather", '{"city": "', "12", "-", "true", "nul", "None", "é", "𝄞", "\\u00e9", "\\ud800", "\t", "\x00",
    "text", "<",
    "</function>\n</tool_call>", "\n<parameter=",
]  # fmt: skip
_TEXTS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=40).map("".join)
_FORMATS = st.tuples(
    st.sampled_from([None, *TOOL_PARSERS]), st.sampled_from([None, *REASONING_PARSERS]), st.booleans()
)


_REASONS = st.sampled_from(["stop", "length"])


@settings(max_examples=500, deadline=None)
@given(_TEXTS, _FORMATS, _REASONS, st.booleans(), st.data())
@example('<tool_call>\n{"name": "now"', ("hermes", None, False), "stop", True, None)
def test_any_text_cut_anywhere(text: str, formats: Any, reason: str, parallel: bool, data: Any) -> None:
    check(text, formats, reason, parallel, data)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(_TEXTS, _FORMATS, _REASONS, st.booleans(), st.data())
def test_many_texts_cut_anywhere(text: str, formats: Any, reason: str, parallel: bool, data: Any) -> None:
    check(text, formats, reason, parallel, data)


def check(text: str, formats: Any, reason: str, parallel: bool, data: Any) -> None:
    """Streamed equals whole; arguments are JSON, or, of a call that was not whole, the beginning of JSON."""
    tools, reasoning, inside = formats
    start = "reasoning" if reasoning and inside else "start"
    rest = {"reason": reason, "start": start, "parallel": parallel}
    whole = parse(text, tools, reasoning, **rest)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12)) if data else range(len(text))
    assert parse(text, tools, reasoning, cuts=cuts, **rest) == whole
    assert parse(text, tools, reasoning, cuts=range(len(text)), **rest) == whole
    for _, arguments, ended in whole["calls"]:
        if ended:
            assert isinstance(json.loads(arguments), dict)
        elif arguments:
            value = JsonValue()
            assert value.feed(arguments)[0] == len(arguments)
            assert not value.fault
    assert len(whole["calls"]) <= (len(text) if parallel else 1)
    if not whole["calls"] and reasoning is None:
        assert whole["content"] == text


@settings(max_examples=400, deadline=None)
@given(_TEXTS, _FORMATS, st.sampled_from(["stop", "length"]), st.data())
def test_token_counts_do_not_depend_on_cuts(text: str, formats: Any, reason: str, data: Any) -> None:
    tools, reasoning, inside = formats
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    starts = [0, *ends]
    ids = list(range(len(starts)))

    def count(groups: Sequence[int]) -> int:
        parser = OutputParser(
            table(reasoning, tools), "reasoning" if reasoning and inside else "start", TOOLS
        )
        for a, b in itertools.pairwise([0, *groups, len(starts)]):
            stop = starts[b] if b < len(starts) else len(text)
            parser.feed(text[starts[a] : stop] if a < len(starts) else "", ids[a:b], starts[a:b])
        parser.finish(reason)
        return parser.reasoning_tokens

    one_by_one = count(range(1, len(starts)))
    assert count([]) == one_by_one
    assert 0 <= one_by_one <= len(starts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=5), st.booleans(), st.sampled_from([None, 2]), st.data())
def test_any_json_object_comes_through(value: Any, ascii: bool, indent: int | None, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    reader = JsonValue(keep=True)
    cut = data.draw(st.integers(0, len(text)))
    assert sum(reader.feed(part)[0] for part in (text[:cut], text[cut:])) == len(text)
    assert reader.done
    assert reader.text == text


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([*'{}[]",:\\ue1-.0 \n', "true", '"a"', "1", "\x01"]), max_size=30).map("".join)
)
def test_json_reader_agrees_with_the_library(text: str) -> None:
    reader = JsonValue()
    count, out = reader.feed(text + " ")
    try:
        json.loads(text, strict=False)
        valid = True
    except ValueError:
        valid = False
    assert valid == (reader.done and not text[count:].strip())
    if reader.done:
        json.loads(out)


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("5", {"integer"}, 5), (" 5 ", {"number"}, 5), ("five", {"integer"}, "five"),
        ("True", {"boolean"}, True), ("1", {"boolean"}, "1"),
        ("null", {"string", "null"}, None), ("null", {"string"}, "null"),
        ('{"a": [1]}', {"object"}, {"a": [1]}), ('{"a": 1} x', {"object"}, '{"a": 1} x'),
        ("[True]", {"array"}, [True]), ("007", {"integer"}, "007"),
        ("1e5", {"number"}, 1e5), ("", {"integer"}, ""),
    ],
)  # fmt: skip
def test_values_become_what_the_schema_asks(text: str, kinds: set[str], expected: Any) -> None:
    assert json.loads(coerced(text, frozenset(kinds))) == expected


def test_kinds_of_schemas() -> None:
    properties = TOOLS["weather"]["properties"]
    assert kinds_of(properties["unit"], TOOLS["weather"]) == {"string"}
    assert kinds_of(properties["note"]) == {"string", "null"}
    assert kinds_of({"const": 3}) == {"integer"}
    assert kinds_of({"$ref": "#/a"}, {"a": {"$ref": "#/a"}}) == set()
    assert kinds_of({"$ref": "elsewhere"}) == kinds_of(None) == kinds_of({}) == set()


def test_formats_by_template() -> None:
    assert tools_of("... <function=example> <tool_call>") == "qwen3_coder"
    assert tools_of("<tool_call>\\n{") == "hermes"
    assert tools_of("[TOOL_CALLS]") == "mistral"
    assert tools_of('<|start_header_id|> {"name": , "parameters": }') == "llama3_json"
    assert tools_of("<|im_start|>") is None
    assert reasoning_of("<|im_start|> </think>") == "qwen3"
    assert reasoning_of("<｜Assistant｜></think>") == "deepseek_r1"
    assert reasoning_of("plain") is None
    assert tool_format("mistral").id_length == 9
