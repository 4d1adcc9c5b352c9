"""What a grammar of calls lets a model write, the parser of the same format reads as calls that hold."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from thinking import tokenizer

from plait.server.replies import Reply
from plait.text.grammar import Grammars
from plait.text.parsing import Function, OutputFormat
from plait.text.tokenizer import Tokenizer

TOKENS = tokenizer()
END = TOKENS.token_id("<|im_end|>") or 0
COMPILER = Grammars(lambda: TOKENS, TOKENS.vocab_size, [END])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "deep": {"type": ["boolean", "null"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 5}},
}
TOOLS: dict[str, Any] = {"weather": SCHEMA, "now": None}
FUNCTIONS = [Function("weather", SCHEMA, strict=True), Function("now", None)]
ENDINGS = [
    TOKENS.encode(text) for text in ('"', "\n</parameter>\n", "}", "]", "<tool_call>", "{", "[TOOL_CALLS]")
]
FORMATS = ["hermes", "llama3_json", "mistral", "qwen3_coder"]


def written(grammar: str, seed: int, tokens: int = 1500) -> list[int]:
    """What a random model writes under a grammar; now and then it tries to end what it is at."""
    draw = random.Random(seed)
    matcher = COMPILER.submit(grammar).result(30).deep_copy()
    answer: list[int] = []
    while len(answer) < tokens:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        assert allowed, matcher.get_error()
        ending = draw.choice(ENDINGS)
        if END in allowed and draw.random() < 0.3:
            return answer
        if draw.random() < 0.3 and matcher.validate_tokens(ending) == len(ending):
            chosen = ending
        else:
            chosen = [draw.choice([t for t in allowed if t != END] or [END])]
        if chosen == [END]:
            return answer
        assert matcher.consume_tokens(chosen)
        answer += chosen
    raise AssertionError(f"no end in {TOKENS.decode(answer)}")


def read(form: OutputFormat, answer: list[int], forced: str = "") -> Reply:
    reply = Reply(form.parser("", TOOLS, forced=forced))
    reply._take(TOKENS.decode(answer, skip_special_tokens=False), (), (), "stop", None)
    return reply


def check(reply: Reply) -> None:
    for call in reply.calls:
        assert call.ended
        jsonschema.validate(json.loads(call.json), TOOLS[call.name] or {"type": "object"})


def format_of(name: str, template: str = "") -> OutputFormat:
    return OutputFormat(TOKENS, template, "none", name)


@pytest.mark.parametrize("only", ["weather", None])
@pytest.mark.parametrize(("name", "template"), [*((name, "") for name in FORMATS), ("mistral", "[ARGS]")])
def test_an_answer_that_must_be_a_call_is_one(name: str, template: str, only: str | None) -> None:
    form = format_of(name, template)
    forced, seen = form.forced(only), set()
    functions = FUNCTIONS[: 1 if only else 2]
    grammar = form.call_grammar(COMPILER.holds).forced(functions, forced, parallel=True)
    for seed in range(12):
        answer = written(grammar, seed)
        reply = read(form, answer, forced)
        assert reply.calls, TOKENS.decode(answer)
        assert reply.content is None, TOKENS.decode(answer)
        check(reply)
        seen.add(len(reply.calls))
    assert len(seen) > 1
    one = form.call_grammar(COMPILER.holds).forced(functions, forced, parallel=False)
    assert all(len(read(form, written(one, seed), forced).calls) == 1 for seed in range(6))


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_may_be_a_call(name: str) -> None:
    """Text, or calls that hold, or both; never a call that the grammar did not see."""
    form = format_of(name)
    grammar = form.call_grammar(COMPILER.holds).free(FUNCTIONS, parallel=True)
    kinds = set()
    for seed in range(30):
        reply = read(form, written(grammar, seed))
        check(reply)
        kinds.add(bool(reply.calls))
    assert kinds == {True, False}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_json_or_a_call(name: str) -> None:
    form = format_of(name)
    asked = {"type": "array", "items": {"type": "integer"}}
    grammar = form.call_grammar(COMPILER.holds).free(FUNCTIONS, True, asked)
    kinds = set()
    for seed in range(30):
        reply = read(form, written(grammar, seed))
        check(reply)
        kinds.add(bool(reply.calls))
        if not reply.calls:
            jsonschema.validate(json.loads(reply.content or ""), asked)
    assert kinds == {True, False}


def test_tags_that_are_special_tokens_are_asked_for_by_id() -> None:
    made = tokenizer().backend
    made.add_special_tokens(["[TOOL_CALLS]"])
    special = Tokenizer(made, eos_token="<|im_end|>")
    compiler = Grammars(lambda: special, special.vocab_size, [END])
    form = OutputFormat(special, "[ARGS]", "none", "mistral")
    grammar = form.call_grammar(compiler.holds).free(FUNCTIONS, parallel=True)
    matcher = compiler.submit(grammar).result(30).deep_copy()
    answer = [special.token_id("[TOOL_CALLS]") or 0, *special.encode("now[ARGS]{}")]
    assert matcher.consume_tokens(answer)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$"}}},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "minProperties": 1},
        {"type": "object", "properties": {"a>b": {"type": "string"}}, "required": ["a>b"]},
        {"type": "object", "properties": {"a": {"enum": ["</parameter>"]}}},
    ],
)
def test_a_strict_schema_that_tags_cannot_keep_is_an_error(schema: dict[str, Any]) -> None:
    form = format_of("qwen3_coder")
    with pytest.raises(ValueError, match="f"):
        form.call_grammar(COMPILER.holds).free([Function("f", schema, strict=True)], True)


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_that_is_a_hint_gives_way(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}, "b": {"pattern": "(?=x)", "type": "string"}}}
    form = format_of(name)
    forced = form.forced("f")
    grammar = form.call_grammar(COMPILER.holds).forced([Function("f", schema)], forced, True)
    assert COMPILER.holds(grammar)
