"""Reports from the field, bit for bit, with 32 requests at once: mixed batches, and hits against misses."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence

import pytest
from checkpoints import VOCAB, checkpoint
from offline import Answer, make_core, run

from plait.core.sampling_params import SamplingParams
from plait.engine.core import EngineCore
from plait.kernels.cpu.native import MISSING, native

pytestmark = pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}")

FAMILIES = ("llama", "qwen3_5", "qwen3_5_moe")
AT_ONCE = 32
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.8, max_tokens=TOKENS, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    native.set_threads(1)


@functools.cache
def prompts() -> list[list[int]]:
    """32 prompts of 3 to 500 tokens, half of them with common beginnings."""
    draw = random.Random(13)
    stem = draw.choices(range(3, VOCAB), k=230)
    alone = [draw.choices(range(3, VOCAB), k=round(3 * (500 / 3) ** (i / 15))) for i in range(16)]
    shared = [stem[: 10 + 14 * i] + draw.choices(range(3, VOCAB), k=1 + 5 * i) for i in range(16)]
    both = alone + shared
    draw.shuffle(both)
    return both


def start(family: str, **settings) -> EngineCore:
    return make_core(checkpoint(family), device="cpu", **settings)


def ask(core: EngineCore, params: SamplingParams, at_once: int = AT_ONCE) -> list[Answer]:
    return run(core, prompts(), params, at_once=at_once, seeds=range(AT_ONCE))


@functools.cache
def alone(family: str, greedy: bool) -> list[Answer]:
    """One by one, with the cache off."""
    params = GREEDY if greedy else DRAWN
    got = ask(start(family, enable_prefix_caching=False), params, at_once=1)
    assert len({tuple(answer.tokens) for answer in got}) == AT_ONCE
    return got


def same(got: Sequence[Answer], want: Sequence[Answer]) -> None:
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs), f"request {i}"
        assert len(ours.tokens) == TOKENS


# -- C5: prompts that land while others decode ---------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("greedy", [True, False])
def test_bursts_of_prompts_among_decodes(family: str, greedy: bool) -> None:
    """Eight answers grow; then the rest arrives at once, in chunks beside them, on two threads."""
    params = GREEDY if greedy else DRAWN
    core = start(family, max_num_batched_tokens=96, enable_prefix_caching=False)
    native.set_threads(2)
    answers = [Answer() for _ in prompts()]
    mixed = steps = 0

    def send(numbers: range) -> None:
        for i in numbers:
            core.add(str(i), list(prompts()[i]), params, seed=i, max_tokens=TOKENS)

    send(range(8))
    while core.has_work:
        if steps == 6:
            send(range(8, AT_ONCE))
        counts = core.scheduler.counters
        before = counts.generated_tokens, counts.computed_tokens
        for progress in core.step().progress:
            answers[int(progress.request_id)].tokens += progress.tokens
            answers[int(progress.request_id)].logprobs += progress.logprobs
        generated, computed = counts.generated_tokens - before[0], counts.computed_tokens - before[1]
        mixed += 0 < generated < computed
        steps += 1
    assert mixed >= 10
    same(answers, alone(family, greedy))


# -- C6: a hit equals a miss ---------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("greedy", [True, False])
def test_cold_warm_partly_evicted_and_without_cache(family: str, greedy: bool) -> None:
    params, want = GREEDY if greedy else DRAWN, alone(family, greedy)
    same(ask(start(family, enable_prefix_caching=False, max_num_batched_tokens=200), params), want)
    core = start(family, max_num_batched_tokens=200)
    cold = ask(core, params)
    same(cold, want)
    warm = ask(core, params)
    same(warm, want)
    whole = sum(answer.num_cached_tokens for answer in warm)
    assert whole > sum(answer.num_cached_tokens for answer in cold)
    size = core.scheduler.cache.geometry.page_size
    assert whole == sum((len(prompt) - 1) // size * size for prompt in prompts())
    evict_half(core)
    partly = ask(core, params)
    same(partly, want)
    assert 0 < sum(answer.num_cached_tokens for answer in partly) < whole
    core.reset_prefix_cache()
    again = ask(core, params, at_once=1)
    same(again, want)


def evict_half(core: EngineCore) -> None:
    """Strangers' prompts push out what is worth least, until half of the pages are gone."""
    cache = core.scheduler.cache
    before = set(cache.index.nodes)
    draw = random.Random(17)
    stranger = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(500):
        prompt = draw.choices(range(3, VOCAB), k=900)
        run(core, [prompt], stranger, check_every=100)
        if len(before & set(cache.index.nodes)) < len(before) / 2:
            return
    raise AssertionError("500 strangers evicted too little")
