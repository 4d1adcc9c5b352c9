"""Asynchronous scheduling: the same bits as without, whatever ends or is cancelled in flight.

Preemption is in ``test_bits.py``; memory under any delay in ``test_symbolic.py``.
"""

from __future__ import annotations

import asyncio
import functools
import random
from pathlib import Path

import pytest
from checkpoints import VOCAB, checkpoint
from driver import make_worker
from live import small_model
from offline import Answer, make_core, run

from plait.config import EngineArgs
from plait.core.plan import Copy, Kind, StepPlan
from plait.core.sampling_params import SamplingParams
from plait.engine.async_engine import AsyncEngine
from plait.engine.core import NOT_FINITE, EngineCore
from plait.kernels.cpu.native import MISSING, native
from plait.worker.line import StepLine

FAMILIES = ("llama", "qwen3_5", "qwen3_5_moe")
COUNT = 16

exact = pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}")


@functools.cache
def prompts() -> list[list[int]]:
    """Of 1 to 150 tokens; each second one begins as the one before it."""
    draw = random.Random(11)
    fresh = [[draw.randrange(3, VOCAB) for _ in range(n)] for n in (1, 7, 16, 33, 50, 64, 90, 150)]
    return [prompt for first in fresh for prompt in (first, [*first[: len(first) * 3 // 4], 5, 6, 7])]


@functools.cache
def params() -> list[SamplingParams]:
    """Answers that end by a stop token or by their length; ways to sample that look at what was said."""
    draw, found = random.Random(12), []
    for i in range(COUNT):
        ways: list[dict] = [
            {"temperature": 0, "logprobs": 2},
            {"temperature": 0.8, "presence_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 1},
            {"temperature": 0.9, "top_p": 0.9, "min_tokens": 1 if i % 3 == 1 else 9, "logprobs": 0},
            {
                "temperature": 0.7,
                "top_k": 30,
                "frequency_penalty": 0.5,
                "logit_bias": {9: 2.0},
            },
        ]
        stops = draw.sample(range(3, VOCAB), 60)
        found.append(SamplingParams(max_tokens=(9, 1, 29)[i % 3], stop_token_ids=stops, **ways[i // 3 % 4]))
    return found


def first_turn(core: EngineCore, at_once: int = 10**9) -> list[Answer]:
    return run(core, prompts(), params(), at_once=at_once, seeds=range(COUNT), check_every=1)


def second_turn(core: EngineCore, first: list[Answer], at_once: int = 10**9) -> list[Answer]:
    """The conversation goes on: what was asked, what was said, and something new."""
    longer = [[*prompt, *answer.tokens, 8, 9] for prompt, answer in zip(prompts(), first, strict=True)]
    return run(core, longer, params(), at_once=at_once, seeds=range(50, 50 + COUNT), check_every=1)


@functools.cache
def expected(family: str) -> tuple[list[Answer], list[Answer]]:
    """One by one, nothing cached, each step waited for."""
    core = make_core(checkpoint(family), enable_prefix_caching=False, async_scheduling=False)
    first = first_turn(core, at_once=1)
    return first, second_turn(core, first, at_once=1)


def same(got: list[Answer], want: list[Answer]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)
        assert (ours.finish_reason, ours.failed) == (theirs.finish_reason, None)


def assert_empty(core: EngineCore) -> None:
    core.scheduler.check()
    usage = core.scheduler.cache.usage()
    assert usage["pages_used"] == usage["states_used"] == 0
    assert not core.has_work


@exact
@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cases_are_worth_something(family: str) -> None:
    """Answers end by stop tokens and by length, before and after min_tokens, and differ."""
    first, _ = expected(family)
    reasons = [answer.finish_reason for answer in first]
    assert min(reasons.count("stop"), reasons.count("length")) >= 4
    assert len({len(answer.tokens) for answer in first}) > 5
    assert len({tuple(answer.tokens) for answer in first}) > COUNT * 2 // 3


@exact
@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("on", [False, True])
def test_two_turns(family: str, on: bool) -> None:
    """Together, in chunks, then again from pages, snapshots and leaves."""
    core = make_core(checkpoint(family), async_scheduling=on, max_num_batched_tokens=70)
    want_first, want_second = expected(family)
    first = first_turn(core)
    same(first, want_first)
    second = second_turn(core, first)
    same(second, want_second)
    if family != "llama":
        assert core.scheduler.cache.counters.hits["leaf"] > 4
    assert sum(answer.num_cached_tokens for answer in second) > 300
    assert_empty(core)


@exact
@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_leaf_behind_the_end_token(family: str) -> None:
    """An answer was ended by its token: the step in flight computes that token, and the next turn, which
    repeats the answer, computes only what is new."""
    want, _ = expected(family)
    which = max(
        (i for i in range(COUNT) if want[i].finish_reason == "stop"), key=lambda i: len(want[i].tokens)
    )
    core = make_core(checkpoint(family), async_scheduling=True)
    (answer,) = run(core, [prompts()[which]], [params()[which]], seeds=[which])
    same([answer], [want[which]])
    said = [*prompts()[which], *answer.tokens]
    (again,) = run(core, [[*said, 8, 9]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    size = core.scheduler.cache.geometry.page_size
    assert again.num_cached_tokens == (len(said) // size * size if family == "llama" else len(said))
    cold = make_core(checkpoint(family), async_scheduling=False)
    (want_again,) = run(cold, [[*said, 8, 9]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert again.tokens == want_again.tokens


@exact
@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_cancels_in_flight(family: str) -> None:
    """Some are cancelled at any step, and their ids used again at once; the others do not notice."""
    want, _ = expected(family)
    for seed in range(4):
        draw = random.Random(seed)
        core = make_core(checkpoint(family), async_scheduling=True, max_num_batched_tokens=50)
        got: dict[str, list[int]] = {}

        def add(i: int, core: EngineCore = core, got: dict[str, list[int]] = got) -> None:
            got[str(i)] = []
            core.add(str(i), prompts()[i], params()[i], seed=i, max_tokens=params()[i].max_tokens or 1)

        for i in range(COUNT):
            add(i)
        while core.has_work:
            for progress in core.step().progress:
                got[progress.request_id] += progress.tokens
            core.scheduler.check()
            if core.scheduler.requests and draw.random() < 0.3:
                request_id = draw.choice(list(core.scheduler.requests))
                said = want[int(request_id)].tokens
                assert said[: len(got[request_id])] == got[request_id]
                assert core.cancel(request_id)
                del got[request_id]
                if draw.random() < 0.5:
                    add(int(request_id))
        for request_id, tokens in got.items():
            assert tokens == want[int(request_id)].tokens
        assert got
        assert_empty(core)


def test_the_next_step_is_launched_before_this_one_is_waited_for() -> None:
    core = make_core(checkpoint("qwen3_5"), async_scheduling=True)
    plain = make_core(checkpoint("qwen3_5"), async_scheduling=False)
    for one, in_flight in ((core, 1), (plain, 0)):
        one.add("a", [5, 6, 7], SamplingParams(temperature=0, ignore_eos=True), seed=0, max_tokens=9)
        for _ in range(4):
            assert len(one.step().progress) == 1
            assert len(one.scheduler.flight) == in_flight
        while one.has_work:
            one.step()
        assert one.scheduler.counters.steps == 9
        stats = one.stats()
        assert 0 < stats.idle_seconds_total < 9
        assert stats.cpu_seconds_total > 0
        one.close()


def test_what_has_no_finite_logits_ends_once() -> None:
    """Memory is spoiled under requests with two steps in flight: each fails, once, and its memory returns."""
    core = make_core(checkpoint("qwen3_5"), async_scheduling=True)
    for name in "abc":
        core.add(name, prompts()[6], SamplingParams(temperature=0, ignore_eos=True), seed=0, max_tokens=500)
    for _ in range(3):
        assert not core.step().failed
    core.worker.arena.data.fill_(0xFF)
    failed: list[str] = []
    while core.has_work:
        outcome = core.step()
        assert set(outcome.failed.values()) <= {NOT_FINITE}
        assert not outcome.refused
        failed += outcome.failed
        core.scheduler.check()
    assert sorted(failed) == ["a", "b", "c"]
    assert_empty(core)


@pytest.mark.parametrize("threaded", [True, False])
def test_no_step_runs_behind_one_that_broke(threaded: bool) -> None:
    worker = make_worker(checkpoint("llama"))
    line = StepLine(worker, threaded)
    broken = StepPlan(1, (), copies=(Copy(Kind.PAGE, 10**6, 0),))
    untouched = worker.arena.page(1).clone()
    line.launch(broken)
    line.launch(StepPlan(2, (), copies=(Copy(Kind.PAGE, 0, 1),)))
    worker.arena.page(0).zero_()
    for _ in range(2):
        with pytest.raises(IndexError, match="page 1000000"):
            line.collect()
    assert bool((worker.arena.page(1) == untouched).all())
    line.close()
    worker.close()


def test_an_engine_process_says_the_same(tmp_path: Path) -> None:
    """Over the whole way: several answers, stop strings, requests that end while others go on."""
    model = small_model(tmp_path)

    async def answers(on: bool) -> list:
        args = EngineArgs(model=str(model), load_format="dummy", seed=1, cpu_threads=1, async_scheduling=on)
        engine = await AsyncEngine.start(args)
        try:
            assert any(f"async scheduling: {'on' if on else 'off'}" in line for line in engine.info.decisions)
            drawn = SamplingParams(n=3, temperature=0.9, max_tokens=40, seed=5, logprobs=1, stop=["e", "the"])
            plain = SamplingParams(temperature=0, max_tokens=25, presence_penalty=0.5, ignore_eos=True)
            asked = [engine.generate(f"Number {i}:", drawn if i % 2 else plain) for i in range(6)]
            outputs = [
                [(o.text, o.token_ids, o.logprobs) for o in r.outputs] for r in await asyncio.gather(*asked)
            ]
            while (await engine.stats()).pages_used:
                pass
            return outputs
        finally:
            await engine.close()

    assert asyncio.run(answers(True)) == asyncio.run(answers(False))
