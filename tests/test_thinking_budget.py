"""A bound on reasoning: a rule over tokens that scheduling cannot change, and its effect on real answers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from checkpoints import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import make_core, run

from plait.core.sampling_params import SamplingParams, ThinkingBudget
from plait.engine.messages import params_from_wire, params_to_wire
from plait.worker.thinking import ThinkingState

NEWLINE, OPEN, CLOSE, CALL = 10, 7, 8, 9
BUDGET = ThinkingBudget(6, (NEWLINE, CLOSE), 1, ((CLOSE,), (CALL,)))


def played(budget: ThinkingBudget, model: list[int]) -> list[int]:
    """The answer of a model that would say ``model``."""
    answer: list[int] = []
    state = ThinkingState(budget)
    for token in model:
        forced = state.forced
        answer.append(token if forced is None else forced)
        state.append(answer[-1])
    return answer


def test_reasoning_is_closed_in_time() -> None:
    assert played(BUDGET, [1] * 12) == [1] * 5 + [NEWLINE, CLOSE] + [1] * 5  # six tokens, and the tag


@pytest.mark.parametrize("end", [CLOSE, CALL])
def test_reasoning_that_ends_by_itself_is_left_alone(end: int) -> None:
    model = [1, 1, end, *[2] * 20]
    assert played(BUDGET, model) == model


def test_an_answer_that_does_not_begin_inside() -> None:
    budget = ThinkingBudget(2, (NEWLINE, CLOSE), 1, ((CLOSE,),), (OPEN,))
    assert played(budget, [1] * 9) == [1] * 9
    assert played(budget, [OPEN, *[1] * 5]) == [OPEN, 1, NEWLINE, CLOSE, 1, 1]
    # one block in an answer: what comes behind it is not reasoning
    assert played(budget, [OPEN, CLOSE, OPEN, 1, 1, 1, 1]) == [OPEN, CLOSE, OPEN, 1, 1, 1, 1]


def test_a_budget_of_nothing() -> None:
    assert played(ThinkingBudget(0, (NEWLINE, CLOSE), 1, ((CLOSE,),)), [1] * 4) == [NEWLINE, CLOSE, 1, 1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([1, OPEN, CLOSE, CALL, NEWLINE, 20, 21]), max_size=40),
    st.integers(0, 12),
    st.sampled_from([(), (OPEN,), (20, 21)]),
    st.sampled_from([(CLOSE,), (20, 21)]),
)
def test_resuming_anywhere_goes_on_alike(
    model: list[int], tokens: int, opens: tuple[int, ...], close: tuple[int, ...]
) -> None:
    budget = ThinkingBudget(tokens, (NEWLINE, *close), len(close), (close, (CALL,)), opens)
    answer = played(budget, model)
    straight = ThinkingState(budget)
    for i, token in enumerate(answer):
        assert ThinkingState(budget, answer[:i]).forced == straight.forced
        straight.append(token)
    if not opens and CALL not in answer:
        ends = [i for i in range(len(answer)) if tuple(answer[i : i + len(close)]) == close]
        inside = ends[0] if ends else len(answer)
        assert inside <= max(tokens, 1) + len(close)  # a tag of two tokens may be forced behind its own half


def test_the_wire_keeps_it() -> None:
    params = SamplingParams(thinking_budget=BUDGET)
    assert params_from_wire(params_to_wire(params)) == params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scheduling_does_not_change_a_bounded_answer(temperature: float) -> None:
    """Alone, in a batch, and preempted for want of memory: the same tokens and log-probabilities."""
    folder = checkpoint("qwen3_5")
    prompts = [[5 + i, 30, 31, 32 + i] * (3 + i) for i in range(6)]
    budget = ThinkingBudget(7, (500, 501), 1, ((501,),))
    asked = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, logprobs=1)
    each = [replace(asked, thinking_budget=budget) for _ in prompts]
    alone = run(make_core(folder), prompts, each, at_once=1, seeds=range(6))
    core = make_core(folder, slabs=9)
    short = run(core, prompts, each, seeds=range(6))
    assert core.scheduler.counters.preemptions > 0
    for a, b in itertools.zip_longest(alone, short):
        assert (a.tokens, a.logprobs) == (b.tokens, b.logprobs)
        place = a.tokens.index(501)
        assert place <= 7
        if place == 7:
            assert a.tokens[6] == 500
