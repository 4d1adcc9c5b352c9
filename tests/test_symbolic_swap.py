"""Swap under symbolic memory: preempted requests come back to what they left, whatever happens meanwhile.

The second half plants bugs on purpose: each must be caught, or the test proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

import pytest
from planting import plant
from symbolic import Corruption, SymbolicWorker, answer
from symbolic_tier import SymbolicTier
from symbolic_world import World

from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.limits import SchedulerConfig
from plait.core.memory import Memory
from plait.core.plan import Way
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Scheduler
from plait.core.swap import SwapSpace
from plait.core.tiers import Tiers

STEPS = 8_000
WORLDS = 40


class BusyWorld(World):
    """Many requests at once with long answers, so that they are preempted all the time."""

    answer_lengths: ClassVar[list[int]] = [8, 40, 80]
    sequences: ClassVar[list[int]] = [40] * 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache.store.budget = self.rng.choice([None, None, 0])  # with 0, what was shared is soon lost


def worlds(count: int, **settings) -> Iterator[BusyWorld]:
    """Such as have little memory."""
    seeds = itertools.count()
    while count:
        seed = next(seeds)
        world = BusyWorld(seed, depth=1 + seed % 3, **settings)
        if world.geometry.num_slabs <= 40:
            count -= 1
            yield world


def test_swapping_corrupts_nothing():
    """With tiers beside it in every second world."""
    totals = dict.fromkeys(("kept", "resumed", "too_full", "lost"), 0)

    def tiers(world: World) -> Tiers | None:
        return Tiers(world.cache, SymbolicTier(world)) if world.seed % 2 else None

    for world in worlds(WORLDS, check_every=3, make_swap=SwapSpace, make_tiers=tiers):
        world.run(STEPS // WORLDS)
        assert not any(world.scheduler.swap.book.units)
        for name in totals:
            totals[name] += getattr(world.scheduler.swap.counters, name)
    # The worlds are worth something only if all of this happens in them.
    assert min(totals["kept"], totals["resumed"], totals["too_full"]) > 50, totals
    assert totals["lost"] > 0, totals


@pytest.mark.parametrize("state_bytes", [0, 200])
@pytest.mark.parametrize("elder_ends", [False, True])
def test_pages_that_others_held(state_bytes, elder_ends):
    """They are not copied. If they are there when the request comes back it goes on, else it starts again."""
    geometry = Geometry(4, 64, state_bytes, 1, 64 * 100)
    cache = Cache(geometry, budget=0)  # what no request holds is gone at once
    swap = SwapSpace(cache, geometry)
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=100)
    scheduler = Scheduler(cache, config, swap=swap)
    worker = SymbolicWorker(geometry)
    worker.swap = SymbolicWorker(geometry)
    answers = {"elder": [], "younger": []}

    def step():
        plan = scheduler.schedule()
        for progress in scheduler.update(plan, worker.execute(plan)):
            answers[progress.request_id] += progress.tokens
        scheduler.check()

    prompts = {"elder": list(range(20)), "younger": [*range(20), 7, 8, 9, 10, 11]}
    for name, prompt in prompts.items():
        scheduler.add(Request(name, list(prompt), len(prompt), SamplingParams(), 0, 30))
        for _ in range(3):
            step()
    younger = scheduler.requests["younger"]
    assert [page.refs for page in younger.pages] == [2, 2, 2, 2, 2, 1, 1]
    scheduler.preemption.preempt(younger)
    assert list(younger.image.pages) == [5, 6]
    if elder_ends:
        scheduler.cancel("elder")
    while scheduler.has_work:
        step()
    assert answers["younger"] == answer(prompts["younger"], 30, frozenset())
    assert (swap.counters.lost, swap.counters.resumed) == ((1, 0) if elder_ends else (0, 1))
    assert not any(swap.book.units)


# -- planted bugs -------------------------------------------------------------------------------


class EarlyImage(SwapSpace):
    """Copies the request's memory before the moves that are on their way."""

    def keep(self, request):
        before = len(self.cache.memory.copies)
        super().keep(request)
        copies = self.cache.memory.copies
        copies[:] = copies[before:] + copies[:before]


class ReusedImage(SwapSpace):
    """Gives the image's units back while it is still needed."""

    def keep(self, request):
        super().keep(request)
        if request.image is not None:
            image = request.image
            self.drop(request)
            request.image = image

    def drop(self, request):
        if request.status.value == "running":
            super().drop(request)
        request.image = None


class WrongCursor(SwapSpace):
    """Goes on one token before the image."""

    def resume(self, request, end):
        if request.image.cursor > 1:
            request.image.cursor -= 1
        return super().resume(request, end)


class SharedLeftOut(SwapSpace):
    """Forgets that shared pages are not in the image."""

    def is_usable(self, request):
        return request.image is not None

    def resume(self, request, end):
        pages = request.image.pages
        for number in range(request.image.num_pages):
            pages.setdefault(number, next(iter(pages.values())) if pages else request.image.slot)
        done = super().resume(request, end)
        return done

    def _give(self, units):
        super()._give(list({id(unit): unit for unit in units}.values()))


class LateCopies(Memory):
    """Freezes the plan before what was swapped out is copied: the copies come one step later."""

    def launch(self, step):
        late = [copy for copy in self.copies if copy.way is Way.OUT]
        self.copies[:] = [copy for copy in self.copies if copy.way is not Way.OUT]
        copies = super().launch(step)
        self.copies += late
        return copies


class LostToken(Scheduler):
    """Drops the token that a request's last step gave after it was swapped out."""

    def update(self, plan, result, seconds=None):
        kept = {r.id: r.image for r in self.queues.waiting if r.image is not None}
        for request in self.queues.waiting:
            if request.id in kept:
                request.image.epoch = -1
        progress = super().update(plan, result, seconds)
        for request in self.queues.waiting:
            if request.id in kept and request.image is not None:
                request.image.committed = request.image.cursor
        return progress


@pytest.mark.parametrize(
    ("bug", "sign"),
    [
        (EarlyImage, ""),
        (ReusedImage, ""),
        (WrongCursor, ""),
        (SharedLeftOut, ""),
        (LateCopies, ""),
        (LostToken, "nothing is scheduled"),
    ],
    ids=["before-the-moves", "buffer-reused", "another-position", "shared-page-lost", "copied-late",
         "lost-token"],
)  # fmt: skip
def test_planted_bug_is_caught(monkeypatch, bug, sign):
    """By what is read, or by the given sign."""
    swap = bug if issubclass(bug, SwapSpace) else SwapSpace
    if swap is SwapSpace:
        plant(monkeypatch, bug)
    for world in worlds(100, check_every=0, make_swap=swap):
        try:
            world.run(200 if world.seed % 2 else 400)
        except AssertionError as fault:
            if sign in str(fault) if sign else isinstance(fault, Corruption):
                return
        except Exception:
            continue  # noticed in another way; the intended one must come too
    pytest.fail("the bug was never noticed")
