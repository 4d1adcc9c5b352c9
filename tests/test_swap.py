"""Swap with the real engine: preempted requests resume to the bit, and their memory is bounded."""

from __future__ import annotations

import functools
import random

import pytest
from checkpoints import VOCAB, checkpoint
from offline import Answer, make_core, run

from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.resolve import load_worker, resolve
from plait.engine.sharing import finish, share_memory

FAMILIES = ("qwen3_5", "qwen3_5_moe", "llama")
TOKENS = 60


@functools.cache
def crowd() -> tuple[list[list[int]], list[SamplingParams]]:
    """Short prompts, some with a common beginning, and answers for which the arena has no room."""
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCAB) for _ in range(70)]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 130))] for _ in range(10)]
    prompts += [shared + prompt[:20] for prompt in prompts[:6]]
    common = {"max_tokens": TOKENS, "ignore_eos": True}
    greedy = SamplingParams(temperature=0, logprobs=2, **common)
    drawn = SamplingParams(temperature=0.8, logprobs=1, presence_penalty=0.5, **common)
    return prompts, [greedy if i % 2 else drawn for i in range(len(prompts))]


@functools.cache
def alone(family: str) -> list[Answer]:
    prompts, params = crowd()
    core = make_core(checkpoint(family), enable_prefix_caching=False)
    return run(core, prompts, params, at_once=1, seeds=range(len(prompts)))


def same(got: list[Answer], want: list[Answer]) -> bool:
    return [(a.tokens, a.logprobs) for a in got] == [(a.tokens, a.logprobs) for a in want]


def squeezed(family: str, swap_slabs: int, **settings):
    """An engine whose arena holds a few of the requests at their full length."""
    geometry = make_core(checkpoint(family)).scheduler.cache.geometry
    slabs = 3 * geometry.slabs_for(130 + TOKENS)
    return make_core(checkpoint(family), slabs=slabs, swap_slabs=swap_slabs, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
def test_resumed_answers_are_the_same_to_the_bit(family, caching):
    prompts, params = crowd()
    core = squeezed(family, 200, enable_prefix_caching=caching, max_num_batched_tokens=64)
    assert same(run(core, prompts, params, seeds=range(len(prompts)), check_every=1), alone(family))
    swap = core.swap.counters
    assert swap.kept > 0
    assert swap.resumed > 0
    assert swap.too_full == 0
    assert not any(core.swap.book.units)


def test_no_token_of_a_swapped_request_is_computed_twice():
    """Without a cache to recompute from, all tokens are computed exactly once."""
    prompts, params = crowd()
    core = squeezed("qwen3_5", 200, enable_prefix_caching=False, max_num_batched_tokens=64)
    run(core, prompts, params, seeds=range(len(prompts)))
    assert core.scheduler.counters.preemptions == core.swap.counters.kept == core.swap.counters.resumed > 0
    assert core.scheduler.counters.computed_tokens == sum(len(p) + TOKENS - 1 for p in prompts)
    again = squeezed("qwen3_5", 0, enable_prefix_caching=False, max_num_batched_tokens=64)
    run(again, prompts, params, seeds=range(len(prompts)))
    assert again.scheduler.counters.computed_tokens > core.scheduler.counters.computed_tokens


@pytest.mark.parametrize("swap_slabs", [2, 3])
def test_what_finds_no_room_is_computed_again(swap_slabs):
    prompts, params = crowd()
    core = squeezed("qwen3_5", swap_slabs, enable_prefix_caching=False, max_num_batched_tokens=64)
    assert same(run(core, prompts, params, seeds=range(len(prompts)), check_every=1), alone("qwen3_5"))
    assert core.swap.counters.too_full > 0
    assert core.scheduler.counters.preemptions == core.swap.counters.kept + core.swap.counters.too_full


def test_prompt_log_probabilities_survive():
    """Those of the chunks before the preemption are kept, not scored again."""
    prompts, _ = crowd()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=1)

    def scores(core):
        found = {}
        for i, prompt in enumerate(prompts):
            core.add(str(i), prompt, params, seed=0, max_tokens=TOKENS)
        while core.has_work:
            for progress in core.step().progress:
                if progress.prompt_logprobs is not None:
                    found[progress.request_id] = progress.prompt_logprobs
        return found

    core = squeezed("qwen3_5", 200, max_num_batched_tokens=16)
    assert scores(core) == scores(make_core(checkpoint("qwen3_5")))
    assert core.swap.counters.resumed > 0


def test_the_latest_and_least_urgent_is_the_victim():
    prompts, params = crowd()
    core = squeezed("qwen3_5", 200, scheduling_policy="priority", max_num_batched_tokens=64)
    for i, prompt in enumerate(prompts):
        core.add(str(i), prompt, params[i], seed=i, max_tokens=TOKENS, priority=i % 2)
    victims = []
    keep = core.swap.keep

    def watch(request):
        victims.append((request.priority, request.arrival))
        assert all(victims[-1] >= (other.priority, other.arrival) for other in core.scheduler.queues.running)
        keep(request)

    core.swap.keep = watch
    while core.has_work:
        core.step()
    assert len(victims) > 2
    assert {priority for priority, _ in victims} == {0, 1}


def test_cancelled_while_swapped_out():
    prompts, params = crowd()
    core = squeezed("qwen3_5", 200, enable_prefix_caching=False, max_num_batched_tokens=64)
    for i, prompt in enumerate(prompts):
        core.add(str(i), prompt, params[i], seed=i, max_tokens=TOKENS)
    cancelled = 0
    while core.has_work:
        core.step()
        for request in list(core.scheduler.queues.waiting):
            if request.image is not None and cancelled < 3:
                core.cancel(request.id)
                cancelled += 1
        core.scheduler.check()
    assert cancelled == 3
    assert not any(core.swap.book.units)


@pytest.mark.parametrize("limit", [None, "8MiB"])
def test_the_buffer_lies_inside_the_memory_limit(limit):
    args = EngineArgs(
        model=str(checkpoint("qwen3_5")), memory_limit="4GiB", max_num_batched_tokens=64,
        preemption_mode="swap", swap_limit=limit,
    )  # fmt: skip
    resolved = resolve(args)
    plan, without = (
        share_memory(resolved, 2**30),
        share_memory(
            resolve(EngineArgs(model=args.model, memory_limit="4GiB", max_num_batched_tokens=64)), 2**30
        ),
    )
    assert plan.arena + plan.swap == without.arena
    assert 0 < plan.swap <= (8 * 2**20 if limit else without.arena / 8)
    worker = load_worker(resolved)
    finished = finish(resolved, worker)
    assert any(decision.name == "swap" for decision in finished.decisions)
    assert worker.swap_geometry.page_bytes == worker.geometry.page_bytes
    worker.close()
