"""What the prefix cache costs where it finds nothing, by counters: on all-miss traffic, under 3% of prefill.

The unit of prefill work is what the recurrence alone moves: each token reads and writes every state once. A
copy reads and writes one once, too, so a snapshot costs as much as one token; projections, attention and the
rest of what a token costs are left out, which makes the share look larger than it is.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from checkpoints import VOCAB, checkpoint
from offline import make_core, run

from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.limits import SchedulerConfig
from plait.core.plan import ChunkResult, Kind, StepPlan, StepResult
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Scheduler
from plait.engine.core import EngineCore
from plait.engine.stats import EngineStats
from plait.worker.runner import PreparedStep

MOST = 0.03


def prompts(count: int, shortest: int, longest: int, seed: int = 1) -> list[list[int]]:
    """Of lengths whose logarithm is uniform; no two begin with the same page."""
    draw = random.Random(seed)
    lengths = [round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))) for _ in range(count)]
    return [[draw.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def share(copied: int, tokens: int, geometry: Geometry) -> float:
    return copied / (tokens * geometry.state_bytes)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "llama"])
def test_all_misses_compute_each_token_once_and_copy_little(family: str) -> None:
    asked = prompts(60, 60, 1500)
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 6, ignore_eos=True) for i in range(60)]
    found: list[EngineStats] = []
    for caching in (True, False):
        core = make_core(
            checkpoint(family), slabs=3000, enable_prefix_caching=caching, max_num_batched_tokens=200
        )
        run(core, asked, params, seeds=range(60))
        found.append(core.stats())
        geometry = core.scheduler.cache.geometry
    cached, plain = found
    prompt_tokens = sum(map(len, asked))
    needed = prompt_tokens + sum((p.max_tokens or 0) - 1 for p in params)  # the last token is not computed
    assert cached.computed_tokens_total == plain.computed_tokens_total == needed
    assert cached.recomputed_tokens_total == plain.recomputed_tokens_total == 0
    assert cached.steps_total == plain.steps_total  # no step is split to take a snapshot
    assert cached.cached_tokens_total == 0
    assert sum(plain.copied_bytes_total.values()) == 0
    if geometry.has_state:
        assert set(cached.copied_bytes_total) == {"snapshot"}
        assert sum(cached.snapshots_taken_total.values()) > 60
        assert 0 < share(cached.copied_bytes_total["snapshot"], prompt_tokens, geometry) < MOST
    else:
        assert sum(cached.copied_bytes_total.values()) == 0


RATIOS = {"4B": 1570, "27B": 2350, "35B-A3B": 3140}
"""Tokens of pages that take as much memory as a state, in hybrids of these sizes."""


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
@pytest.mark.parametrize("lengths", [(128, 128), (300, 3000), (2000, 30_000)])
@pytest.mark.parametrize("chat", [False, True])
def test_snapshots_of_real_shapes(ratio: int, lengths: tuple[int, int], chat: bool) -> None:
    """The scheduler's own counters, without a model; conversations mark two more positions."""
    geometry = Geometry(16, 1024, ratio * 64, 1, arena_bytes=400 * ratio * 64)
    scheduler = Scheduler(Cache(geometry), SchedulerConfig(2048, 16, 40_000))
    total = 0
    for i, prompt in enumerate(prompts(60, *lengths)):
        request = Request(str(i), prompt, len(prompt), SamplingParams(max_tokens=3), 0, 3)
        if chat:
            request.tail, request.boundaries = len(prompt) - 5, (len(prompt) // 3, len(prompt) // 2)
        scheduler.add(request)
        total += len(prompt)
    exports = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        exports += sum(len(chunk.exports) for chunk in plan.chunks)
        results = tuple(ChunkResult(c.request_id, (7,) if c.sample else ()) for c in plan.chunks)
        scheduler.update(plan, StepResult(plan.step, results))
    counters, copied = scheduler.counters, scheduler.cache.counters.copied_bytes
    assert counters.computed_tokens - counters.recomputed_tokens == total + 60 * 2
    assert copied["snapshot"] == exports * geometry.state_bytes > 0
    assert copied["restore"] == 0
    assert share(copied.total(), total, geometry) < MOST


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_counters_equal_what_plans_carry(family: str, caching: bool) -> None:
    """In an arena too small for all: moves, restores, exports and tokens computed twice."""
    draw = random.Random(5)
    stem = [draw.randrange(3, VOCAB) for _ in range(200)]
    asked = [stem[: draw.randrange(200)] + prompt for prompt in prompts(40, 1, 150)]
    geometry = make_core(checkpoint(family)).scheduler.cache.geometry
    slabs = 2 * geometry.slabs_for(480)
    core = make_core(
        checkpoint(family), slabs=slabs, enable_prefix_caching=caching, max_num_batched_tokens=64
    )
    seen = watch(core, geometry)
    run(core, asked, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    stats = core.stats()
    assert stats.preemptions_total > 0
    assert stats.computed_tokens_total == seen["tokens"]
    assert stats.recomputed_tokens_total == seen["again"] > 0
    assert sum(stats.copied_bytes_total.values()) == seen["bytes"]
    if caching and geometry.has_state:
        assert stats.copied_bytes_total["restore"] > 0
        assert stats.copied_bytes_total["snapshot"] > 0


def watch(core: EngineCore, geometry: Geometry) -> Counter[str]:
    """Counts what the worker is told to do."""
    seen: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    runner = core.worker.runner
    real = runner.prepare

    def prepare(plan: StepPlan) -> PreparedStep:
        for chunk in plan.chunks:
            before = reached[chunk.request_id]
            seen["tokens"] += chunk.count
            seen["again"] += sum(position < before for position in range(chunk.start, chunk.end))
            reached[chunk.request_id] = max(before, chunk.end)
            seen["bytes"] += len(chunk.exports) * geometry.state_bytes
        for copy in plan.copies:
            seen["bytes"] += geometry.page_bytes if copy.kind is Kind.PAGE else geometry.state_bytes
        return real(plan)

    runner.prepare = prepare  # type: ignore[method-assign]
    return seen
