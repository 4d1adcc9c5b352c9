"""Answers that follow a grammar: the state of one answer, and answers of real engines."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import Answer, run
from offline import make_core as make_core_of
from thinking import thinking_model, tokenizer

from plait.core.sampling_params import SamplingParams, Structure, ThinkingBudget
from plait.engine.core import EngineCore
from plait.engine.messages import params_from_wire, params_to_wire
from plait.text.grammar import GrammarError, Grammars
from plait.text.structure import of_choice, of_grammar, of_json_object, of_lark, of_regex, of_schema
from plait.worker.structure import StructureState

TOKENS = tokenizer()
END = TOKENS.token_id("<|im_end|>") or 0
OPEN, CLOSE, CALL = (TOKENS.token_id(tag) or 0 for tag in ("<think>", "</think>", "<tool_call>"))
NEWLINE = TOKENS.encode("\n\n")[0]
QUOTE = TOKENS.encode('"')[0]
VOCAB = TOKENS.vocab_size
COMPILER = Grammars(lambda: TOKENS, VOCAB, [END])
YEAR = of_regex("(19|20)[0-9]{2}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("thinking"))


def make_core(model: Path, **settings: Any) -> EngineCore:
    return make_core_of(model, load_format="dummy", **settings)


def text_of(answer: Answer) -> str:
    return TOKENS.decode(answer.tokens)


# -- the state of one answer -------------------------------------------------------------------------


def state(structure: Structure, answer: list[int] | None = None) -> StructureState:
    matcher = COMPILER.submit(structure.grammar).result(30).deep_copy()
    return StructureState(structure, matcher, VOCAB, [END], answer or ())


def allowed(state: StructureState) -> set[int]:
    return {int(i) for i in state.allowed.nonzero()[0]}


def test_the_end_may_come_where_the_grammar_may_stop() -> None:
    at = state(Structure(of_regex("ab?")))
    assert END not in allowed(at)
    at.append(TOKENS.encode("a")[0])
    assert allowed(at) == {END, *TOKENS.encode("b")}
    at.append(TOKENS.encode("b")[0])
    assert allowed(at) == {END}
    for _ in range(3):  # with ignore_eos the end may be asked for again
        at.append(END)
        assert allowed(at) == {END}


LARGE = of_lark(
    'start: "x" | "y" VALUE\nVALUE: TEXT "\\n</parameter>\\n"\n'
    r"TEXT: /(?s:.{0,800})/ & ~/(?s:.*)(<\/parameter>|\n<parameter=|<\/tool_call>)(?s:.*)/"
)
"""Its second branch goes beyond the limits at the first token of its text."""


def test_nothing_may_come_where_a_grammar_outgrows_its_limits() -> None:
    """Above all no end, which would pass half an answer off as a whole one."""
    at = state(Structure(LARGE))
    assert allowed(at) == {*TOKENS.encode("x"), *TOKENS.encode("y")}
    at.append(TOKENS.encode("y")[0])
    assert allowed(at) == set()
    COMPILER.forget(LARGE)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_that_outgrows_its_grammar_is_refused_and_others_are_not(model: Path, ahead: bool) -> None:
    core = make_core(model, async_scheduling=ahead)
    x, y = TOKENS.encode("x")[0], TOKENS.encode("y")[0]
    for token, ends in ((y, None), (x, "stop"), (y, None), (x, "stop")):
        core.add(
            "a",
            [5, 6],
            SamplingParams(structure=Structure(LARGE), logit_bias={token: 50.0}),
            seed=1,
            max_tokens=20,
        )
        refused, finished = {}, None
        while core.has_work:
            outcome = core.step()
            refused |= outcome.refused
            finished = next((p.finish_reason for p in outcome.progress if p.finish_reason), finished)
        assert finished == ends
        assert bool(refused) == (ends is None)
        assert not refused or "limits" in refused["a"]
    core.close()


def test_reasoning_is_free_and_neither_ends_the_answer_nor_calls() -> None:
    at = state(Structure(YEAR, ends=((CLOSE,),), lead=(NEWLINE,), barred=(CALL,)))
    assert allowed(at) == set(range(VOCAB)) - {END, CALL}
    for token in TOKENS.encode("free 2010 text"):
        at.append(token)
    at.append(CLOSE)
    digits = {t for t in range(VOCAB) if TOKENS.token_bytes(t) in (b"1", b"2", b"19", b"20")}
    assert allowed(at) == digits | {NEWLINE}
    at.append(NEWLINE)
    assert allowed(at) == digits


def test_a_model_that_may_begin_to_reason() -> None:
    structure = Structure(YEAR, ends=((CLOSE,),), opens=OPEN)
    begun = state(structure)
    assert {OPEN, *TOKENS.encode("2")} <= allowed(begun)
    begun.append(OPEN)
    assert len(allowed(begun)) == VOCAB - 1
    begun.append(CLOSE)
    assert OPEN not in allowed(begun)
    assert OPEN not in allowed(state(structure, TOKENS.encode("2")))


def test_an_end_tag_of_several_tokens() -> None:
    end = tuple(TOKENS.encode("</x>"))
    assert len(end) > 1
    at = state(Structure(YEAR, ends=(end,)), [*TOKENS.encode("a"), *end[:-1]])
    assert len(allowed(at)) == VOCAB - 1
    at.append(end[-1])
    assert len(allowed(at)) < 10


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_resuming_anywhere_goes_on_alike(data: st.DataObject) -> None:
    structure = Structure(
        of_schema({"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 4}),
        ends=data.draw(st.sampled_from([(), ((CLOSE,),)])),
        lead=(NEWLINE,),
    )
    straight, answer = state(structure), []
    for _ in range(30):
        assert allowed(state(structure, answer)) == allowed(straight)
        token = data.draw(st.sampled_from(sorted(allowed(straight))))
        answer.append(token)
        straight.append(token)


def test_the_wire_keeps_it() -> None:
    params = SamplingParams(structure=Structure("g", ((1, 2), (3,)), 4, (5,), (6,)))
    assert params_from_wire(params_to_wire(params)) == params


# -- grammars ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [
        of_regex("(unclosed"),
        of_regex("a(?=b)"),
        of_schema({"type": "strin"}),
        of_schema({"not": {"type": "null"}}),
        of_schema({"type": "array", "uniqueItems": True}),
        of_schema({"type": "string", "format": "no-such"}),
        of_schema({"$ref": "http://127.0.0.1:9/schema"}),
        of_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        of_schema({"type": "integer", "minimum": 2, "maximum": 1}),
        of_regex("a" * 600_000),
    ],
    ids=lambda grammar: grammar[:60],
)
def test_what_cannot_be_kept_is_an_error(grammar: str) -> None:
    with pytest.raises(GrammarError) as caught:
        COMPILER.submit(grammar).result(30)
    assert 0 < len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_what_is_no_schema_is_an_error_at_once() -> None:
    deep: dict = {"type": "array"}
    for _ in range(5000):
        deep = {"items": deep}
    for bad in (deep, [], "x", None, {"x-guidance": {"lenient": True}}):
        with pytest.raises(ValueError, match=r"schema|x-guidance"):
            of_schema(bad)
    with pytest.raises(ValueError, match="longer than 256 KiB"):
        of_schema({"enum": ["a" * 300_000]})
    for choices in ([], [""], [1], "ab"[:0]):
        with pytest.raises(ValueError, match="choice"):
            of_choice(choices)


def test_a_grammar_is_compiled_once() -> None:
    assert COMPILER.submit(YEAR) is COMPILER.submit(YEAR)


# -- answers -----------------------------------------------------------------------------------------

ASKED = SamplingParams(max_tokens=300, temperature=1.0, logprobs=1, logit_bias={QUOTE: 3.0})
GRAMMARS = [
    of_regex("[0-9,]{240,260}"),
    of_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 35, "maxItems": 40}),
    of_regex("[a-f]{150,170}"),
    YEAR,
    of_choice(["yes", "no", "perhaps", "per se"]),
    of_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    of_grammar('start: "(" start ")" | /[a-z]{1,3}/'),
    of_grammar('root ::= "x" ("," [0-9]+)*'),
    of_json_object(),
]
PROMPTS = [TOKENS.encode(f"What is number {i}?") * (4 + i) for i in range(len(GRAMMARS))]


def structured(**more: object) -> list[SamplingParams]:
    return [replace(ASKED, structure=Structure(grammar, **more)) for grammar in GRAMMARS]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Answer]:
    return run(make_core(model), PROMPTS, structured(), at_once=1, seeds=range(9))


def test_answers_follow_their_grammars(alone: list[Answer]) -> None:
    digits, flags, letters, year, choice, schema, nested, gbnf, obj = map(text_of, alone)
    assert re.fullmatch("(19|20)[0-9]{2}", year)
    assert choice in ("yes", "no", "perhaps", "per se")
    assert type(json.loads(schema)["a"]) is int
    depth = len(nested) - len(nested.lstrip("("))
    assert re.fullmatch("[a-z]{1,3}" + re.escape(")" * depth), nested.lstrip("("))
    assert re.fullmatch("x(,[0-9]+)*", gbnf)
    assert isinstance(json.loads(obj), dict)
    assert re.fullmatch("[0-9,]{240,260}", digits)
    assert re.fullmatch("[a-f]{150,170}", letters)
    assert {type(flag) for flag in json.loads(flags)} == {bool}
    assert {answer.finish_reason for answer in alone} == {"stop"}


@pytest.mark.parametrize(
    ("slabs", "settings"),
    [
        (None, {}),
        (None, {"async_scheduling": True}),
        (9, {}),
        (9, {"async_scheduling": True}),
        (None, {"max_num_batched_tokens": 16}),
    ],
    ids=["batched", "async", "preempted", "async, preempted", "small chunks"],
)
def test_scheduling_does_not_change_a_structured_answer(
    model: Path, alone: list[Answer], slabs: int | None, settings: dict
) -> None:
    core = make_core(model, slabs=slabs, **settings)
    answers = run(core, PROMPTS, structured(), seeds=range(9))
    core.close()
    assert (core.scheduler.counters.preemptions > 0) == (slabs is not None)
    for a, b in itertools.zip_longest(alone, answers):
        assert (a.tokens, a.logprobs, a.finish_reason) == (b.tokens, b.logprobs, b.finish_reason)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thinking_comes_first_and_its_budget_holds(model: Path, temperature: float) -> None:
    """Random weights never close their reasoning: the budget does."""
    budget = ThinkingBudget(9, (NEWLINE, CLOSE), 1, ((CLOSE,),))
    structure = Structure(YEAR, ends=((CLOSE,),), lead=(NEWLINE,))
    params = replace(ASKED, temperature=temperature, structure=structure, thinking_budget=budget)
    for answer in run(make_core(model), PROMPTS, params, seeds=range(9)):
        place = answer.tokens.index(CLOSE)
        assert place <= 9
        assert re.fullmatch("(19|20)[0-9]{2}", TOKENS.decode(answer.tokens[place + 1 :]).strip())


def test_an_answer_that_is_cut_ends_as_length(model: Path) -> None:
    structure = Structure(of_regex("[a-f]{400}"))
    [answer] = run(make_core(model), PROMPTS[:1], replace(ASKED, max_tokens=12, structure=structure))
    assert answer.finish_reason == "length"
    assert re.fullmatch("[a-f]{12,}", text_of(answer))


def test_min_tokens_gives_way_where_nothing_else_can_come(model: Path) -> None:
    params = replace(ASKED, min_tokens=50, structure=Structure(YEAR))
    [answer] = run(make_core(model), PROMPTS[:1], params)
    assert re.fullmatch("(19|20)[0-9]{2}", text_of(answer))
    params = replace(ASKED, min_tokens=50, structure=Structure(of_regex("[0-9]{1,600}")))
    [answer] = run(make_core(model), PROMPTS[:1], params)
    assert len(answer.tokens) >= 50
    assert text_of(answer).isdecimal()


def test_a_grammar_that_cannot_be_had_ends_its_request_alone(model: Path) -> None:
    core = make_core(model)
    core.add("bad", PROMPTS[0], replace(ASKED, structure=Structure(of_regex("("))), seed=0, max_tokens=9)
    core.add("good", PROMPTS[0], replace(ASKED, structure=Structure(YEAR)), seed=0, max_tokens=9)
    core.add("gone", PROMPTS[0], replace(ASKED, structure=Structure(of_regex("gone"))), seed=0, max_tokens=9)
    assert core.cancel("gone")
    refused: dict[str, str] = {}
    ended = []
    while core.has_work:
        outcome = core.step()
        refused |= outcome.refused
        ended += [p.request_id for p in outcome.progress if p.finish_reason]
    assert list(refused) == ["bad"]
    assert "unclosed" in refused["bad"]
    assert ended == ["good"]
