"""A bound on cached memory that no request holds, and the tree of what is cached."""

from __future__ import annotations

import random

import pytest
from symbolic_world import World

from plait.core.tree import branches


class Bounded(World):
    """Looks at the bound after every tick."""

    worst = 0
    evicted_for_it = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        arena = self.geometry.num_slabs * self.geometry.slab_bytes
        self.cache.store.budget = self.rng.choice([0, 300, arena // 10, arena // 3])

    def tick(self) -> None:
        super().tick()
        self.worst = max(self.worst, self.cache.store.cached_bytes)
        assert self.cache.store.cached_bytes <= self.cache.store.budget
        tree_is_sound(self)


def tree_is_sound(world: World) -> None:
    """Each branch goes on where its parent ends; together they hold every page, snapshot and leaf once."""
    if world.rng.random() < 0.9:
        return
    cache = world.cache
    size = cache.geometry.page_size
    found = branches(cache, 10**9)
    for place, branch in enumerate(found):
        before = found[branch.parent].end if branch.parent is not None else 0
        assert branch.parent is None or branch.parent < place
        assert branch.start == before < branch.end
    nodes = cache.index.nodes.values()
    assert sum(branch.end - branch.start for branch in found) == len(nodes) * size
    assert sum(branch.snapshot is not None for branch in found) == sum(n.snapshot is not None for n in nodes)
    leaves = [
        leaf for key, beside in cache.index.leaves.items() if key in cache.index.nodes for leaf in beside
    ]
    assert sum(len(branch.leaves) for branch in found) == len(leaves)
    some = random.Random(world.steps).randrange(1, 5)
    assert branches(cache, some) == found[:some]


def test_the_budget_holds_at_every_moment():
    hits, worst = 0, []
    for seed in range(30):
        world = Bounded(seed, depth=1 + seed % 2, check_every=5)
        world.run(200)
        worst.append(world.worst)
        counted = world.cache.counters.hits
        hits += sum(counted.values()) - counted["none"]
    assert sum(bytes > 0 for bytes in worst) > 10
    assert hits > 50  # what fits into the budget is still found


@pytest.mark.parametrize("budget", [0, 10**12])
def test_without_room_nothing_is_kept_and_without_bound_everything(budget):
    world = World(3, check_every=1)
    world.cache.store.budget = budget
    world.run(150)
    assert (world.cache.store.cached_bytes == 0) == (budget == 0)
    assert bool(branches(world.cache, 100)) == (budget > 0)
