"""On row-invariant kernels scheduling changes no bit: neither of tokens nor of log-probabilities.

Each request is answered once, alone and with nothing cached. Every other way through the engine (token
budgets, company, cache hits, preemption) must give the same answer, and the same log-probabilities.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from checkpoints import VOCAB, checkpoint
from gguf.constants import GGMLQuantizationType as Kind
from offline import Answer, make_core, run

from plait.core.sampling_params import SamplingParams
from plait.kernels.cpu.native import MISSING, native

pytestmark = [
    pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}"),
    pytest.mark.usefixtures("cpu_kernels"),
]

FAMILIES = ("llama", "qwen3_5", "qwen3_5_moe")
TOKENS = 24


def ways(tokens: int) -> tuple[SamplingParams, ...]:
    """Ways to sample answers of so many tokens."""
    common = {"max_tokens": tokens, "ignore_eos": True}
    return (
        SamplingParams(temperature=0, logprobs=3, **common),
        SamplingParams(temperature=0.8, logprobs=0, **common),
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=1, **common),
        SamplingParams(temperature=0.8, top_k=20, min_p=0.01, logprobs=1, **common),
    )


@functools.cache
def prompts() -> list[list[int]]:
    """Of 1 to 700 tokens; the last two share beginnings with the one before them."""
    draw = random.Random(7)
    found = [[draw.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 16, 33, 64, 150, 700)]
    return [*found, [*found[-1][:400], 5, 6, 7], [*found[-1][:401], 9]]


def requests(count: int) -> tuple[list[int], list[SamplingParams], list[int]]:
    """(which prompt, how to sample, seed) of ``count`` requests, all different."""
    which = [i % len(prompts()) for i in range(count)]
    params = [ways(TOKENS)[(i + i // len(prompts())) % 4] for i in range(count)]
    return which, params, [1000 + i for i in range(count)]


COUNT = 18


@functools.cache
def expected(family: str) -> list[Answer]:
    """Answers one by one, whole prompts, without cache."""
    return answers(family, at_once=1, enable_prefix_caching=False)


def answers(family: str, *, at_once: int = 10**9, **settings) -> list[Answer]:
    return ask(make_core(checkpoint(family), **settings), at_once=at_once)


def ask(core, order: Sequence[int] | None = None, at_once: int = 10**9) -> list[Answer]:
    """The requests in an order of arrival; answers in the order of the requests."""
    which, params, seeds = requests(COUNT)
    order = order or range(COUNT)
    got = run(
        core, [prompts()[which[i]] for i in order], [params[i] for i in order],
        at_once=at_once, seeds=[seeds[i] for i in order],
    )  # fmt: skip
    found = dict(zip(order, got, strict=True))
    return [found[i] for i in range(COUNT)]


def same(got: Sequence[Answer], want: Sequence[Answer]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.failed is theirs.failed is None
        assert len(ours.tokens) == TOKENS
        assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_differ_from_each_other(family: str) -> None:
    """Else equality would say little."""
    found = expected(family)
    assert len({tuple(answer.tokens) for answer in found}) == COUNT
    assert sum(len(set(answer.tokens)) for answer in found) > 10 * COUNT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 64, 100, 2048])
def test_any_token_budget(family: str, budget: int) -> None:
    if budget == 1:  # a step for each token: the shorter prompts say enough
        core = make_core(checkpoint(family), max_num_batched_tokens=1, enable_prefix_caching=False)
        which, params, seeds = requests(6)
        got = run(core, [prompts()[i] for i in which], params, seeds=seeds)
        same(got, expected(family)[:6])
    else:
        same(answers(family, max_num_batched_tokens=budget, enable_prefix_caching=False), expected(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ahead", [True, False])
def test_all_at_once_on_two_threads(family: str, ahead: bool) -> None:
    core = make_core(checkpoint(family), max_num_batched_tokens=300, async_scheduling=ahead)
    native.set_threads(2)
    order = list(range(COUNT))
    random.Random(3).shuffle(order)
    same(ask(core, order), expected(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_second_and_third_sighting(family: str) -> None:
    """From the cache or not: prompts that meet each other's pages, their own, and their own again."""
    core = make_core(checkpoint(family), max_num_batched_tokens=300)
    for sighting in range(3):
        got = ask(core, at_once=1 if sighting == 1 else 5)
        same(got, expected(family))
    assert sum(answer.num_cached_tokens for answer in got) > 2000


@functools.cache
def crowd(family: str) -> tuple[list[list[int]], list[SamplingParams], list[Answer]]:
    """Many short prompts with longer answers, then a long prompt; and their answers one by one."""
    which = [i for i, prompt in enumerate(prompts()) if len(prompt) < 200] * 4 + [6]
    asked, params = [prompts()[i] for i in which], [ways(64)[i // 6 % 4] for i in range(len(which))]
    core = make_core(checkpoint(family), enable_prefix_caching=False)
    return asked, params, run(core, asked, params, at_once=1, seeds=range(len(which)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_after_preemption_and_eviction(family: str, caching: bool, ahead: bool) -> None:
    """An arena too small for all: later requests are preempted, and their cache is evicted."""
    asked, params, want = crowd(family)
    geometry = make_core(checkpoint(family)).scheduler.cache.geometry
    slabs = geometry.slabs_for(700 + 64) + geometry.slabs_for(250)
    core = make_core(
        checkpoint(family), slabs=slabs, enable_prefix_caching=caching, max_num_batched_tokens=128,
        async_scheduling=ahead,
    )  # fmt: skip
    got = run(core, asked, params, seeds=range(len(asked)))
    assert core.scheduler.counters.preemptions > 0
    assert [(a.tokens, a.logprobs) for a in got] == [(a.tokens, a.logprobs) for a in want]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_page_sizes(family: str) -> None:
    for size in (16, 32, 64):
        same(answers(family, block_size=size, max_num_batched_tokens=150), expected(family))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "fp8_e4m3", "int8"])
def test_narrow_caches(kv_dtype: str) -> None:
    """Whatever the entries are rounded to, they are the same on every way."""
    settings = {"kv_cache_dtype": kv_dtype}
    want = answers("qwen3_5", at_once=1, enable_prefix_caching=False, **settings)
    core = make_core(checkpoint("qwen3_5"), max_num_batched_tokens=90, **settings)
    same(ask(core), want)
    same(ask(core, at_once=2), want)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_weights_quantised_on_load(format: str) -> None:
    """Activations are rounded row by row, so company changes nothing here either."""
    settings = {"quantization": format}
    want = answers("qwen3_5_moe", at_once=1, enable_prefix_caching=False, **settings)
    assert [answer.tokens for answer in want] != [answer.tokens for answer in expected("qwen3_5_moe")]
    core = make_core(checkpoint("qwen3_5_moe"), max_num_batched_tokens=90, **settings)
    same(ask(core), want)
    same(ask(core, at_once=2), want)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_weights_in_the_blocks_of_a_file(tmp_path: Path, kind: Kind) -> None:
    metadata = tiny.LLAMA | tiny.tokenizer_metadata(tiny.byte_level(), "gpt2")
    path = tiny.write_gguf(tmp_path / "model.gguf", metadata, tiny.llama_tensors(500), kind)
    which, params, seeds = requests(COUNT)
    asked = [[token % 500 for token in prompts()[i][:200]] for i in which]  # its context ends at 256
    want = run(make_core(path, enable_prefix_caching=False), asked, params, at_once=1, seeds=seeds)
    same(run(make_core(path, max_num_batched_tokens=90), asked, params, seeds=seeds), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_log_probabilities(family: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    found = []
    for budget in (2048, 37):
        core = make_core(checkpoint(family), max_num_batched_tokens=budget)
        core.add("one", prompts()[5], params, seed=0, max_tokens=2)
        scores = []
        while core.has_work:
            for progress in core.step().progress:
                scores += progress.prompt_logprobs or ()
        found.append(scores)
    assert len(found[0]) == len(prompts()[5]) - 1
    assert found[0] == found[1]
