"""Greedy answers of the whole engine against transformers, whatever the schedule."""

from __future__ import annotations

import functools
import random

import pytest
from checkpoints import VOCAB, checkpoint, oracle_greedy
from offline import assert_same_greedy, make_core, run

from plait.core.sampling_params import SamplingParams

TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
FAMILIES = ("llama", "mistral", "qwen3", "qwen3_5", "qwen3_5_moe")


@functools.cache
def cases(family):
    """Prompts of 1 to 700 tokens, some with a common beginning, and the oracle's answers."""
    rng = random.Random(7)
    lengths = (1, 5, 16, 33, 64, 150, 700)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]
    prompts.append([*prompts[-1][:400], 5, 6, 7])
    folder = checkpoint(family)
    return folder, prompts, [oracle_greedy(folder, prompt, TOKENS) for prompt in prompts]


def agree(folder, prompts, answers, wanted):
    for prompt, answer, want in zip(prompts, answers, wanted, strict=True):
        assert answer.finish_reason == "length"
        assert len(set(want)) >= 20, "the oracle's answer says too little"
        assert_same_greedy(folder, prompt, answer.tokens, want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [64, 100, 2048])
def test_any_token_budget(family, budget):
    folder, prompts, wanted = cases(family)
    core = make_core(folder, max_num_batched_tokens=budget)
    agree(folder, prompts, run(core, prompts, GREEDY), wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
def test_alone_then_again(family, caching):
    """One request at a time; then all again, which the cache serves when it is on."""
    folder, prompts, wanted = cases(family)
    core = make_core(folder, enable_prefix_caching=caching)
    agree(folder, prompts, run(core, prompts, GREEDY, at_once=1), wanted)
    again = run(core, prompts, GREEDY, at_once=1)
    agree(folder, prompts, again, wanted)
    size = core.scheduler.cache.geometry.page_size
    for prompt, answer in zip(prompts, again, strict=True):
        assert answer.num_cached_tokens == ((len(prompt) - 1) // size * size if caching else 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_thirty_two_at_once(family):
    folder, prompts, wanted = cases(family)
    core = make_core(folder, max_num_batched_tokens=200)
    order = [i % len(prompts) for i in range(32)]
    answers = run(core, [prompts[i] for i in order], GREEDY)
    agree(folder, [prompts[i] for i in order], answers, [wanted[i] for i in order])


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(family, caching):
    """An arena too small for all: the later requests are preempted and resume exactly."""
    folder, prompts, wanted = cases(family)
    geometry = make_core(folder).scheduler.cache.geometry
    longest = max(len(prompt) for prompt in prompts) + TOKENS
    # Room for little more than the longest: equal prompts may share the pages of their answers too.
    slabs = geometry.slabs_for(longest) + geometry.slabs_for(60)
    core = make_core(folder, slabs=slabs, enable_prefix_caching=caching, max_num_batched_tokens=128)
    short = [i for i, prompt in enumerate(prompts) if len(prompt) < 200]
    order = short * 4 + [len(prompts) - 1]
    answers = run(core, [prompts[i] for i in order], GREEDY)
    assert core.scheduler.counters.preemptions > 0
    agree(folder, [prompts[i] for i in order], answers, [wanted[i] for i in order])


def test_whole_prompts_without_chunking():
    folder, prompts, wanted = cases("qwen3_5")
    core = make_core(folder, enable_chunked_prefill=False)
    agree(folder, prompts, run(core, prompts, GREEDY), wanted)


def test_late_arrivals_and_cancels_leave_others_alone():
    folder, prompts, wanted = cases("qwen3_5")
    core = make_core(folder, max_num_batched_tokens=70)
    core.add("first", prompts[5], GREEDY, seed=0, max_tokens=TOKENS)
    got = []
    for step in range(200):
        if step == 3:
            core.add("doomed", prompts[6], GREEDY, seed=0, max_tokens=TOKENS)
        if step == 9:
            assert core.cancel("doomed")
        got += [t for p in core.step().progress if p.request_id == "first" for t in p.tokens]
        core.scheduler.check()
    assert_same_greedy(folder, prompts[5], got, wanted[5])
    usage = core.scheduler.cache.usage()
    assert usage["pages_used"] == usage["states_used"] == 0
