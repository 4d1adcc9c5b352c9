"""Scheduler and cache under symbolic memory: no model, random everything, each read checked.

The second half plants bugs on purpose: each must be caught, or the test proves nothing.
"""

from __future__ import annotations

import pytest
from planting import plant
from symbolic import Corruption
from symbolic_world import World

from plait.core.arena import ArenaBook, IntegrityError
from plait.core.chunks import Chunks
from plait.core.entrance import Entrance
from plait.core.holdings import Holdings
from plait.core.leaves import Leaves
from plait.core.memory import Memory
from plait.core.publishing import Publisher
from plait.core.request import PendingExport
from plait.core.stepping import Stepping

STEPS = 100_000
WORLDS = 80


def test_no_schedule_corrupts_memory():
    """100,000 steps: arrivals, cancels, priorities, memory sizes, loans; up to three steps in flight, planned
    on awaited tokens, run and heard of late; the books recounted."""
    steps = preemptions = moved = awaited = late = 0
    hits: set[str] = set()
    for seed in range(WORLDS):
        world = World(seed, depth=1 + seed % 3, check_every=3)
        world.run(STEPS // WORLDS)
        steps += world.steps
        preemptions += world.scheduler.counters.preemptions
        moved += world.cache.counters.units_moved
        awaited += world.awaited
        late += world.late
        hits.update(world.cache.counters.hits)
    assert steps >= STEPS
    # The worlds are worth something only if all of this happens in them.
    assert preemptions > 20
    assert moved > 20
    assert awaited > 20_000
    assert late > 100
    assert {"none", "page", "tail", "spaced", "fork", "boundary", "leaf"} <= hits


# -- planted bugs -------------------------------------------------------------------------------


class Leaky(Holdings):
    """Forgets the last page of a request that ends."""

    def release(self, request):
        if len(request.pages) > len(request.nodes):
            request.pages.pop()
        super().release(request)


class DoubleFree(Holdings):
    """Gives the slot (or the first page) of an ended request back twice."""

    def release(self, request):
        held = request.slot or (request.pages[0] if request.pages else None)
        super().release(request)
        if held is not None and not held.refs and not held.cached and self.memory.launched % 7 == 0:
            self.memory.give(held)


class FreesWhileRead(Entrance):
    """Takes over found pages without holding the last: it can be evicted under the reader."""

    def admit(self, request, match):
        done = super().admit(request, match)
        if done and request.pages:
            self.memory.drop(request.pages[-1])
            node = request.nodes[-1]
            node.queued = False
            self.store.queue.add_page(node)
        return done


class WrongPosition(Publisher):
    """Publishes the snapshot of one page later under this page's key."""

    def commit(self, request, exports):
        late = self.reuse.policy.grid
        moved = [PendingExport(max(late, e.position - late), e.state, e.kind) for e in exports]
        super().commit(request, moved)


class EarlyLoan(ArenaBook):
    """Lends memory without waiting for the steps in flight."""

    def _is_over(self, kind, index):
        return True


class NoFence(Memory):
    """Gives memory back as if the step in flight, which still writes it, were over."""

    @property
    def fence(self):
        return self.completed


class EarlyLeaf(Leaves):
    """Publishes the slot of an ended request at once, while a step in flight moves it on."""

    def must_wait(self, request):
        request.num_computed_tokens = request.num_committed_tokens
        return False


class MovedLeaf(Leaves):
    """Waits for the step in flight, but takes the slot for the state before it."""

    def _leave_leaf(self, request, end):
        moved = end == request.num_tokens and end % self.geometry.page_size > 1
        super()._leave_leaf(request, end - 1 if moved else end)


class Endless(Stepping):
    """Launches a request whose last token is awaited."""

    def plan(self, draft):
        for request in self.queues.running:
            request.max_tokens += 1
        super().plan(draft)
        for request in self.queues.requests.values():
            request.max_tokens = request.params.max_tokens


class OffGrid(Chunks):
    """Ends chunks wherever the budget does."""

    def count(self, draft, request, start):
        return min(request.num_tokens - start, max(draft.left, 0))


@pytest.mark.parametrize(
    ("bug", "settings", "caught_by"),
    [
        (Leaky, {}, (IntegrityError, AssertionError)),
        (DoubleFree, {}, IntegrityError),
        (FreesWhileRead, {}, Corruption),
        (WrongPosition, {}, Corruption),
        (EarlyLoan, {"depth": 3, "cancel_rate": 0.2}, Corruption),
        (NoFence, {"depth": 2, "cancel_rate": 0.2}, Corruption),
        (EarlyLeaf, {"depth": 2}, Corruption),
        (MovedLeaf, {"depth": 2}, Corruption),
        (Endless, {"depth": 2}, Corruption),
        (OffGrid, {}, Corruption),
    ],
    ids=[
        "leak",
        "double-free",
        "page-freed-while-read",
        "snapshot-position",
        "reused-early",
        "freed-while-written",
        "leaf-before-its-step",
        "leaf-position",
        "beyond-the-end",
        "off-grid",
    ],
)
def test_planted_bug_is_caught(monkeypatch, bug, settings, caught_by):
    """Each in the first worlds; where reads can tell, without the integrity check's help."""
    plant(monkeypatch, bug)
    check_every = 0 if caught_by is Corruption else 1
    for seed in range(40):
        world = World(seed, check_every=check_every, **settings)
        try:
            world.run(400)
        except caught_by:
            return
        except Exception:
            continue  # noticed in another way; the intended one must come too
    pytest.fail("the bug was never noticed")


def test_symbolic_answers_are_those_of_a_quiet_run():
    """The check itself can fail: a wrong token is noticed."""
    world = World(3)
    original = world.worker.execute

    def lie(plan):
        result = original(plan)
        for chunk_result in result.results:
            if chunk_result.tokens and plan.step > 50:
                object.__setattr__(chunk_result, "tokens", ((chunk_result.tokens[0] + 1) % 50,))
        return result

    world.worker.execute = lie
    with pytest.raises(Corruption):
        world.run(300)
