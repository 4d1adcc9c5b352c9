"""Thousands of requests with random cancels in full memory: nothing leaks, none is lost, bounds hold."""

from __future__ import annotations

import gc
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB, checkpoint
from offline import make_core

from plait.core.sampling_params import SamplingParams
from plait.engine.core import EngineCore

FULL = 0.95
"""Share of the arena that is in use while requests wait, at least, on average."""
QUEUE = 100
"""Requests that are kept in the engine, most of which wait."""
GROWTH = 16 * 2**20
"""Bytes by which the process may grow from an eighth of the requests to all of them."""


@dataclass
class Crowd:
    """Clients that ask, listen and hang up at random."""

    core: EngineCore
    count: int
    draw: random.Random = field(default_factory=lambda: random.Random(11))
    stems: list[list[int]] = field(
        default_factory=lambda: [random.Random(i).choices(range(3, VOCAB), k=150) for i in range(6)]
    )
    sent: int = 0
    wanted: dict[str, int] = field(default_factory=dict)
    """answer tokens that live requests still wait for"""
    ends: Counter[str] = field(default_factory=Counter)
    doomed: dict[str, int] = field(default_factory=dict)
    """answer tokens after which a client hangs up"""
    used: list[float] = field(default_factory=list)
    """share of the arena in use, per step with a queue"""
    claimed: list[float] = field(default_factory=list)
    """of these, held by running requests"""

    def send(self) -> None:
        draw = self.draw
        if self.sent // QUEUE % 3 == 1:  # a wave that outgrows what it was admitted to
            prompt, tokens = draw.choices(range(3, VOCAB), k=draw.randrange(1, 20)), draw.randrange(90, 160)
        else:
            prompt = draw.choice(self.stems)[: draw.randrange(150)] if draw.random() < 0.4 else []
            prompt = prompt + draw.choices(range(3, VOCAB), k=draw.randrange(1, 90))
            tokens = draw.randrange(1, 30)
        name = str(self.sent)
        params = SamplingParams(temperature=0.8 * draw.randrange(2), max_tokens=tokens, ignore_eos=True)
        self.core.add(name, prompt, params, seed=self.sent, max_tokens=tokens)
        self.sent += 1
        self.wanted[name] = tokens
        if draw.random() < 0.15:
            self.doomed[name] = draw.randrange(tokens + 1)

    def hang_up(self, name: str) -> None:
        assert self.core.cancel(name)
        del self.wanted[name]
        self.ends["cancelled"] += 1

    def step(self) -> None:
        while self.sent < self.count and len(self.wanted) < QUEUE:
            self.send()
        if self.wanted and self.draw.random() < 0.05:  # in the queue, in its prompt, in its answer
            self.hang_up(self.draw.choice(list(self.wanted)))
        outcome = self.core.step()
        assert not {**outcome.failed, **outcome.refused}
        for progress in outcome.progress:
            self.take(progress)
        if self.core.scheduler.queues.waiting:
            self.look()

    def take(self, progress: Any) -> None:
        name = progress.request_id
        if name not in self.wanted:
            return  # the client hung up while this was on its way
        self.wanted[name] -= len(progress.tokens)
        if progress.finish_reason is not None:
            assert progress.finish_reason == "length"
            assert self.wanted.pop(name) == 0
            self.ends["answered"] += 1
        elif name in self.doomed:
            self.doomed[name] -= len(progress.tokens)
            if self.doomed[name] <= 0:
                self.hang_up(name)

    def look(self) -> None:
        usage = self.core.scheduler.cache.usage()
        total, geometry = usage["pages_total"], self.core.scheduler.cache.geometry
        slots = -(-usage["states_used"] // geometry.slab_states) if geometry.has_state else 0
        self.used.append(1 - usage["pages_free"] / total)
        self.claimed.append((usage["pages_used"] + slots * geometry.slab_pages) / total)


def own_bytes() -> int:
    """What this process alone holds and has written: it does not depend on who else maps the libraries."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


def endure(count: int, family: str) -> Crowd:
    geometry = make_core(checkpoint(family)).scheduler.cache.geometry
    slabs = 10 * geometry.slabs_for(150 + 90 + 120)
    core = make_core(checkpoint(family), slabs=slabs, max_num_batched_tokens=512, max_num_seqs=80)
    crowd = Crowd(core, count)
    early = 0
    steps = 0
    while crowd.sent < count or core.has_work:
        crowd.step()
        steps += 1
        if steps % 100 == 0:
            core.scheduler.check()
        if not early and crowd.sent > count // 8:
            gc.collect()
            early = own_bytes()
    gc.collect()
    assert own_bytes() - early < GROWTH
    core.scheduler.check()
    assert not crowd.wanted
    assert crowd.ends.total() == count
    assert len(crowd.used) > 100
    used, claimed = (statistics.mean(shares) for shares in (crowd.used, crowd.claimed))
    print(f"{len(crowd.used)} steps with a queue: {used:.1%} in use, {claimed:.1%} by running requests")
    assert used > FULL
    return crowd


def nothing_is_held(core: EngineCore) -> None:
    """All memory returned: nothing is referenced, and what is cached can go."""
    usage = core.scheduler.cache.usage()
    assert usage["pages_used"] == usage["states_used"] == usage["pages_lent"] == usage["states_lent"] == 0
    core.reset_prefix_cache()
    usage = core.scheduler.cache.usage()
    assert usage["pages_free"] == usage["pages_total"]
    assert not core.scheduler.requests
    assert not core.scheduler.flight
    cache = core.scheduler.cache
    assert cache.store.num_snapshots == cache.publisher.num_pending == 0
    core.scheduler.check()


def finish(crowd: Crowd) -> None:
    stats = crowd.core.stats()
    assert crowd.ends["cancelled"] > crowd.count / 10
    assert stats.requests_total == {"length": crowd.ends["answered"], "abort": crowd.ends["cancelled"]}
    assert stats.preemptions_total > 0
    nothing_is_held(crowd.core)
    crowd.core.close()


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_requests_with_random_cancels_in_full_memory(family: str) -> None:
    crowd = endure(400, family)
    finish(crowd)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_ten_thousand_requests_with_random_cancels(family: str) -> None:
    crowd = endure(10_000, family)
    finish(crowd)
