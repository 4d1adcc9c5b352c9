"""Tiers under symbolic memory: spills and restores late and out of order, beside everything else.

The second half plants races on purpose: each must be caught, or the test proves nothing.
"""

from __future__ import annotations

import pytest
from planting import plant
from symbolic import Corruption
from symbolic_tier import SymbolicTier
from symbolic_world import World

from plait.core.pins import Pins
from plait.core.tiers import Spill, Tiers

STEPS = 12_000
WORLDS = 30


def make_tiers(kind: type[Tiers] = Tiers, stored: dict | None = None):
    return lambda world: kind(world.cache, SymbolicTier(world, stored))


def test_no_transfer_corrupts_memory():
    """Each world is followed by another with the same tier: a restart."""
    steps = 0
    totals = dict.fromkeys(("pages_written", "snapshots_written", "pages_read", "snapshots_read"), 0)
    totals |= dict.fromkeys(("reads_failed", "writes_skipped", "restores"), 0)
    moved = 0
    for seed in range(WORLDS):
        stored: dict = {}
        for life in range(2):
            world = World(seed, depth=1 + seed % 3, check_every=3, make_tiers=make_tiers(stored=stored))
            assert life == 0 or not world.cache.index.nodes
            world.run(STEPS // WORLDS // 2)
            steps += world.steps
            moved += world.cache.counters.units_moved
            for name in totals:
                totals[name] += getattr(world.scheduler.tiers.counters, name)
    assert steps >= STEPS
    # The worlds are worth something only if all of this happens in them.
    assert moved > 20
    assert all(number > 20 for number in totals.values()), totals


# -- planted races ------------------------------------------------------------------------------


class Unpinned(Pins):
    """Lets go of what is still being read: a page is freed, and used again, while a spill reads it."""

    def pin(self, node, snapshot):
        return self.memory.moved

    def unpin(self, node, snapshot):
        pass


class MovesPinned(Pins):
    """Pinned units are not evicted, but they move."""

    def pin(self, node, snapshot):
        fence = super().pin(node, snapshot)
        for unit in self._read_with(node, snapshot):
            unit.readers -= 1
        return fence

    def unpin(self, node, snapshot):
        for unit in self._read_with(node, snapshot):
            unit.readers += 1
        super().unpin(node, snapshot)


class EarlyTiers(Tiers):
    """Reads and writes memory without waiting for the steps that may still touch it."""

    def _begin(self):
        for work in self._fenced:
            work.fence = 0
        super()._begin()


class EarlySpills(Tiers):
    """Reads a unit that is moving right now."""

    def _begin(self):
        for work in self._fenced:
            if isinstance(work, Spill):
                work.fence = 0
        super()._begin()


class EagerTiers(Tiers):
    """Publishes what it restores before the data has arrived."""

    def _begin(self):
        restores = [work for work in self._fenced if not isinstance(work, Spill)]
        super()._begin()
        for restore in restores:
            if restore in self._fenced:
                continue
            for item, _ in restore.parts:
                restore.came[item.key] = item.reason
            restore.snapshot = restore.parts[-1][0].reason
            self._publish(restore)

    def _read(self, restore, item, moved):
        pass


class TrustingTiers(Tiers):
    """Publishes what a failed read left behind."""

    def _read(self, restore, item, moved):
        object.__setattr__(moved, "ok", True)
        super()._read(restore, item, moved)


class WrongDepthTiers(Tiers):
    """Publishes a restored snapshot one page before its own."""

    def _publish(self, restore):
        if len(restore.parts) > 2:
            del self._on_the_way_in[restore.parts[-2][0].name]
            self.cache.loans.end(restore.parts.pop(-2)[1])
        super()._publish(restore)


@pytest.mark.parametrize(
    ("bug", "depth"),
    [
        (Unpinned, 1),
        (MovesPinned, 1),
        (EarlyTiers, 3),
        (EarlySpills, 3),
        (EagerTiers, 1),
        (TrustingTiers, 1),
        (WrongDepthTiers, 1),
    ],
    ids=["freed-while-read", "moved-while-read", "before-the-fence", "while-moving", "published-early",
         "damaged-but-trusted", "another-position"],
)  # fmt: skip
def test_planted_race_is_caught(monkeypatch, bug, depth):
    """By what is read, without the integrity check's help."""
    kind = bug if issubclass(bug, Tiers) else Tiers
    if kind is Tiers:
        plant(monkeypatch, bug)
    for seed in range(60):
        world = World(seed, depth, check_every=0, make_tiers=make_tiers(kind))
        try:
            world.run(400)
        except Corruption:
            return
        except Exception:
            continue  # noticed in another way; the intended one must come too
    pytest.fail("the race was never noticed")
