"""A replayed trace of agents, and a cache driven by it without a model.

Agents share one long tools prompt; each turn re-sends the history with the thinking stripped, adds a
message, and gets an answer. Turns of different agents interleave at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from plait.core.cache import Cache
from plait.core.eviction import EvictionQueue
from plait.core.geometry import Geometry
from plait.core.leaves import Leaves
from plait.core.limits import SchedulerConfig
from plait.core.plan import ChunkResult, StepResult
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Scheduler
from plait.core.snapshots import SnapshotKind, SnapshotPolicy

THINKING = 40
GENERATION_PROMPT = 4


@dataclass(frozen=True)
class Turn:
    tokens: list[int]
    answer: list[int]
    tail: int
    boundaries: tuple[int, ...]


def trace(agents=8, turns=10, tools=1200, new=150, answer=80, seed=1) -> list[Turn]:
    """Turns in order of arrival."""
    rng = random.Random(seed)

    def draw(count):
        return [rng.randrange(50_000) for _ in range(count)]

    system, opening = draw(tools), draw(GENERATION_PROMPT)
    histories = [list(system) for _ in range(agents)]
    order = [agent for agent in range(agents) for _ in range(turns)]
    rng.shuffle(order)
    out = []
    for agent in order:
        history = histories[agent]
        last = len(history)
        history += draw(new)
        said = draw(answer)
        out.append(Turn([*history, *opening], draw(THINKING) + said, len(history), (len(system), last)))
        history += said
    return out


def working_set(turns: list[Turn], geometry: Geometry) -> int:
    """Bytes that would serve every hit: all distinct pages, and a state where each conversation ends."""
    size = geometry.page_size
    pages = {tuple(t.tokens[: end + size]) for t in turns for end in range(0, t.tail - size + 1, size)}
    heads = {tuple(t.tokens[: t.tail]) for t in turns}
    last = [h for h in heads if not any(len(g) > len(h) and g[: len(h)] == h for g in heads)]
    return len(pages) * geometry.page_bytes + (len(last) + 1) * geometry.state_stride


class LastUsedFirstOut(EvictionQueue):
    """Plain LRU."""

    def page_key(self, node):
        return (1, 0.0, node.used)

    def snapshot_key(self, node):
        return (1, 0.0, node.snapshot_used)


class TailsOnly(SnapshotPolicy):
    """One snapshot a prompt, as far back as leaves a token to compute."""

    def marks(self, num_prompt_tokens, found, known, tail=None, boundaries=()):
        return {self.floor(num_prompt_tokens - 1): SnapshotKind.TAIL}

    def due(self, marks, start, end):
        return ((p, kind) for p, kind in sorted(marks.items()) if start < p <= end)


class NoLeaves(Leaves):
    """Keeps nothing of where answers end."""

    def retire(self, request):
        self.holdings.release(request)


def replay(turns: list[Turn], geometry: Geometry, *, plain: bool = False) -> tuple[int, Scheduler]:
    """Cached prompt tokens of the trace, one request after the other."""
    policy = SnapshotPolicy.of(geometry)
    if plain:
        policy = TailsOnly(policy.interval, policy.grid)
    cache = Cache(geometry, policy)
    if plain:
        cache.leaves = NoLeaves(cache.holdings, cache.reuse)
        cache.store.queue = LastUsedFirstOut(geometry)
    scheduler = Scheduler(cache, SchedulerConfig(512, 8, 100_000))
    cached = 0
    for i, turn in enumerate(turns):
        request = Request(
            str(i), list(turn.tokens), len(turn.tokens), SamplingParams(max_tokens=len(turn.answer)), 0,
            len(turn.answer), tail=turn.tail, boundaries=turn.boundaries,
        )  # fmt: skip
        scheduler.add(request)
        said = iter(turn.answer)
        while scheduler.has_work:
            plan = scheduler.schedule()
            results = tuple(ChunkResult(c.request_id, (next(said),) if c.sample else ()) for c in plan.chunks)
            scheduler.update(plan, StepResult(plan.step, results))
        cached += request.num_cached_tokens
    scheduler.check()
    return cached, scheduler


def unbounded(turns: list[Turn], page_size: int) -> int:
    """Cached tokens with endless memory and a snapshot at every page: no policy can do better."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for turn in turns:
        pages = [
            tuple(turn.tokens[: (i + 1) * page_size]) for i in range((len(turn.tokens) - 1) // page_size)
        ]
        known = 0
        while known < len(pages) and pages[known] in seen:
            known += 1
        total += known * page_size
        seen.update(pages)
    return total


def belady(turns: list[Turn], geometry: Geometry) -> int:
    """Cached tokens of a cache that knows the future, in whole conversations.

    A conversation's prefix (its pages behind the tools and one state) is kept or dropped as a whole; when
    memory runs out, the one whose next turn lies farthest ahead goes (Belady, 1966). The tools stay.
    """
    size = geometry.page_size
    whose = [tuple(t.tokens[1200:1260]) for t in turns]
    tools = -(-1200 // size) * geometry.page_bytes + geometry.state_stride
    room = geometry.num_slabs * geometry.slab_bytes - tools - geometry.state_stride  # the running one's slot
    kept: dict[tuple, int] = {}
    total = 0
    for i, turn in enumerate(turns):
        agent = whose[i]
        if agent in kept:
            before = max(t.tail for t, w in zip(turns[:i], whose, strict=False) if w == agent)
            total += before // size * size
        elif i:
            total += 1200 // size * size
        kept[agent] = (turn.tail - 1200) // size * geometry.page_bytes + geometry.state_stride
        while sum(kept.values()) > room:
            nexts = {a: next((k for k in range(i + 1, len(turns)) if whose[k] == a), 10**9) for a in kept}
            kept.pop(max(nexts, key=lambda a: nexts[a]))
    return total
