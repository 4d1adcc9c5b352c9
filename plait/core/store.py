"""What is kept for later requests: pages, snapshots and leaves, found by the prefix index.

All memory that is free of owners may be kept, so whoever wants memory asks here: what is kept makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plait.core.arena import IntegrityError, Unit
from plait.core.counters import CacheCounters
from plait.core.eviction import EvictionQueue
from plait.core.index import Leaf, Node, PrefixIndex
from plait.core.memory import Memory
from plait.core.plan import Kind
from plait.core.snapshots import SnapshotKind


class Store:
    """The prefix index over one memory, and what is given up when that runs out.

    Args:
        memory: where the units are.
        numerics_id: names everything that changes bits; seeds the hash chains.
        budget: most bytes of what is cached and held by no request; None: as much as there is room for.
        counters: where snapshots and evictions are counted.
    """

    def __init__(self, memory: Memory, numerics_id: str, budget: int | None, counters: CacheCounters) -> None:
        self.memory = memory
        self.geometry = geometry = memory.geometry
        self.budget = budget
        self.counters = counters
        self.index = PrefixIndex(geometry.page_size, numerics_id, geometry.has_state)
        self.queue = EvictionQueue(geometry)
        self.num_snapshots = 0
        self.refusals = 0
        """times that no memory could be had"""
        self.on_publish: Callable[[Node], None] | None = None
        """told of each node that a hit can newly end at"""
        self._clock = 0

    # -- memory -----------------------------------------------------------------------------

    def take(self, kind: Kind, near: Unit | None = None) -> Unit | None:
        """A unit with one owner, for which room is made. None: all there is is held."""
        while (unit := self.memory.take(kind, near)) is None:
            if not self._make_room(kind):
                self.refusals += 1
                return None
        return unit

    def _make_room(self, kind: Kind) -> bool:
        """Evict what cannot be hit; else empty a slab by moving what it holds; else evict the oldest."""
        if self.geometry.has_state and not self.queue.has_useless:
            other = Kind.STATE if kind is Kind.PAGE else Kind.PAGE
            if self.memory.vacate(other):
                return True
        return self._evict_one()

    def drop_page(self, page: Unit, node: Node | None) -> None:
        """One owner less of a page. ``node`` is the one that it is published under, if it is."""
        if not self.memory.drop(page):
            return
        if not page.cached:
            self.memory.give(page)
        elif node is not None:
            self.queue.add_page(node)

    # -- use --------------------------------------------------------------------------------

    def tick(self) -> None:
        """What is used from here on is used later than what was used before."""
        self._clock += 1

    def stamp(self, node: Node) -> None:
        """The node is in use now."""
        node.used, node.age = self._clock, self.queue.age

    def use(self, nodes: Iterable[Node]) -> None:
        """The nodes are in use from now on."""
        self.tick()
        for node in nodes:
            self.stamp(node)

    def hit(self, nodes: Sequence[Node], leaf: Leaf | None) -> None:
        """A request goes on from the end of ``nodes``, or from the leaf behind them."""
        self.use(nodes)
        if leaf is not None:
            leaf.hits += 1
            self.queue.leaves_hit += 1
            leaf.used, leaf.age = self._clock, self.queue.age
        elif nodes:
            last = nodes[-1]
            last.snapshot_hits += 1
            last.snapshot_used, last.snapshot_age = self._clock, self.queue.age

    # -- keeping ----------------------------------------------------------------------------

    def attach(self, node: Node, state: Unit, kind: SnapshotKind) -> None:
        """A state that its only owner lets go of becomes the snapshot of a node."""
        self.memory.drop(state)
        self.set_snapshot(node, state, kind)
        self.counters.snapshots_taken[kind.name.lower()] += 1
        if self.on_publish is not None:
            self.on_publish(node)

    def set_snapshot(self, node: Node, state: Unit, kind: SnapshotKind) -> None:
        """A state that nobody holds becomes the snapshot of a node that has none."""
        state.cached = True
        node.snapshot = state
        node.snapshot_kind = kind
        node.snapshot_hits = 0
        node.snapshot_used, node.snapshot_age = self._clock, self.queue.age
        self.num_snapshots += 1
        self.queue.add_snapshot(node)

    def add_leaf(self, leaf: Leaf) -> bool:
        """Its only owner lets go of the leaf's page and state. False (and no change): it is known."""
        if not self.index.add_leaf(leaf):
            return False
        self.memory.drop(leaf.page)
        self.memory.drop(leaf.state)
        self.tick()
        leaf.used, leaf.age = self._clock, self.queue.age
        self.num_snapshots += 1
        self.queue.leaves_made += 1
        self.counters.snapshots_taken["leaf"] += 1
        self.queue.add_leaf(leaf)
        return True

    # -- eviction ---------------------------------------------------------------------------

    def _evict_one(self) -> bool:
        candidate = self.queue.pop()
        if candidate is None:
            return False
        node, snapshot_alone = candidate
        if isinstance(node, Leaf):
            self._evict_leaf(node)
        elif snapshot_alone:
            self._evict_snapshot(node)
        else:
            self._evict_node(node)
        return True

    def _evict_snapshot(self, node: Node) -> None:
        self._forget_snapshot(node)
        node.queued = False  # a leaf is worth less now: a new entry with its new rank
        self.queue.add_page(node)

    def _evict_leaf(self, leaf: Leaf) -> None:
        self.index.remove_leaf(leaf)
        self.memory.give(leaf.page)
        self.memory.give(leaf.state)
        self.num_snapshots -= 1
        self.counters.snapshots_evicted += 1
        self.counters.pages_evicted += 1
        if leaf.parent is not None:
            self.queue.add_page(leaf.parent)

    def _forget_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        node.snapshot.cached = False
        self.memory.give(node.snapshot)
        node.snapshot = None
        self.num_snapshots -= 1
        self.counters.snapshots_evicted += 1

    def _evict_node(self, node: Node) -> None:
        if node.snapshot is not None:
            self._forget_snapshot(node)
        self.index.remove(node)
        self.memory.give(node.page)
        self.counters.pages_evicted += 1
        if node.parent is not None:
            self.queue.add_page(node.parent)

    @property
    def cached_bytes(self) -> int:
        """Bytes of what is cached and held by no request."""
        usage, geometry = self.memory.usage(), self.geometry
        return usage["pages_cached"] * geometry.page_bytes + usage["states_cached"] * geometry.state_stride

    def keep_to_budget(self) -> None:
        """Evict what exceeds the budget; to be called when something has lost its last owner."""
        if self.budget is not None:
            while self.cached_bytes > self.budget and self._evict_one():
                pass

    def clear(self) -> None:
        """Drop everything that no request holds."""
        while self._evict_one():
            pass

    # -- checking ---------------------------------------------------------------------------

    def check(self) -> set[int]:
        """Walk the index.

        Returns:
            ``id`` of each unit that it holds.

        Raises:
            IntegrityError: the tree is broken, a unit stands in it twice, snapshots are miscounted.
        """
        held = [id(unit) for _, unit in self.index.check()]
        cached = set(held)
        if len(cached) != len(held):
            raise IntegrityError("the index holds a unit twice")
        snapshots = sum(node.snapshot is not None for node in self.index.nodes.values())
        snapshots += sum(len(beside) for beside in self.index.leaves.values())
        pinned = sum(unit.readers > 0 for unit in self.memory.units() if unit.kind is Kind.STATE)
        if not snapshots == self.num_snapshots == self.memory.usage()["states_cached"] + pinned:
            raise IntegrityError(f"{self.num_snapshots} snapshots by count, {snapshots} found")
        return cached
