"""What is given up first when memory runs out.

Candidates are the last pages of prefixes (with their snapshot, if they have one), snapshots alone and leaves,
in a heap of

    (0, when it was last used)                       pages that no hit can reach: beyond the deepest snapshot
    (1, age + worth, when it was last used)          everything else

The worth of a thing is the tokens that would have to be computed again without it, per byte that it holds,
times how often it was asked for. ``age`` is the queue's clock: it rises to the key of whatever was evicted
last, and a thing that is used takes the present age. So a costly thing outlives a cheap one that was used at
the same time, and is outlived by a cheap one that is used again and again (GreedyDual-Size: Cao and Irani,
1997; with frequency: Cherkasova, 1998). In a model without recurrent layers all pages are worth the same,
which leaves the order in which they were last used.

Entries are checked when they are popped: one whose node has changed is dropped, or put back with its
present key.
"""

from __future__ import annotations

import heapq

from plait.core.geometry import Geometry
from plait.core.index import Leaf, Node
from plait.core.snapshots import SnapshotKind

Key = tuple[int, float, int]

LIKELY = {
    SnapshotKind.SPACED: 0.25,
    SnapshotKind.FORK: 1.0,
    SnapshotKind.BOUNDARY: 1.0,
    SnapshotKind.TAIL: 1.0,
    SnapshotKind.LEAF: 1.0,
}
"""How likely a snapshot that was never hit is to be asked for."""
MOST_HITS = 8
"""Hits beyond this add nothing, so that what was popular once can be forgotten."""


class EvictionQueue:
    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.age = 0.0
        self.leaves_made = 0
        self.leaves_hit = 0
        self._heap: list[tuple[Key, int, Node | Leaf, bool]] = []
        self._pushes = 0

    # -- worth ------------------------------------------------------------------------------

    def page_key(self, node: Node) -> Key:
        """Key of a leaf page, which takes its snapshot with it."""
        if not self.geometry.has_state:
            return (1, node.age + 1.0, node.used)
        if node.snapshot is None:
            return (0, 0.0, node.used)
        held = self.geometry.state_stride + self.geometry.page_bytes
        return (1, node.age + self._worth(node, held), node.used)

    def snapshot_key(self, node: Node) -> Key:
        """Key of a snapshot alone."""
        return (1, node.snapshot_age + self._worth(node, self.geometry.state_stride), node.snapshot_used)

    def _worth(self, node: Node, held: int) -> float:
        """Tokens to compute again per byte, in the unit of a page's tokens per page's bytes."""
        pages = node.depth - self._depth_before(node)
        likely = min(1 + node.snapshot_hits, MOST_HITS) if node.snapshot_hits else LIKELY[node.snapshot_kind]
        return likely * pages * self.geometry.page_bytes / held

    def leaf_key(self, leaf: Leaf) -> Key:
        """Key of a leaf: how likely one is to be asked for is learned from those before it."""
        above = leaf.parent
        while above is not None and above.snapshot is None:
            above = above.parent
        pages = (leaf.parent.depth if leaf.parent else 0) - (above.depth if above else 0) + 1
        likely = (self.leaves_hit + 1) / (self.leaves_made + 4)
        held = self.geometry.state_stride + self.geometry.page_bytes
        worth = likely * (1 + min(leaf.hits, MOST_HITS)) * pages * self.geometry.page_bytes / held
        return (1, leaf.age + worth, leaf.used)

    @staticmethod
    def _depth_before(node: Node) -> int:
        """Depth of the deepest snapshot above ``node``: where a hit would fall back to."""
        above = node.parent
        while above is not None and above.snapshot is None:
            above = above.parent
        return above.depth if above is not None else 0

    # -- queue ------------------------------------------------------------------------------

    def add_page(self, node: Node) -> None:
        """The page has become a candidate: no children, no request."""
        if not node.queued and not node.children and not node.page.refs:
            node.queued = True
            self._push(self.page_key(node), node, False)

    def add_snapshot(self, node: Node) -> None:
        if not node.snapshot_queued:
            node.snapshot_queued = True
            self._push(self.snapshot_key(node), node, True)

    def add_leaf(self, leaf: Leaf) -> None:
        if not leaf.queued:
            leaf.queued = True
            self._push(self.leaf_key(leaf), leaf, False)

    def _push(self, key: Key, node: Node | Leaf, snapshot: bool) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (key, self._pushes, node, snapshot))

    @property
    def has_useless(self) -> bool:
        """Something (or a stale entry for it) that no hit can reach heads the queue."""
        return bool(self._heap) and self._heap[0][0][0] == 0

    def pop(self) -> tuple[Node | Leaf, bool] | None:
        """The next thing to give up: (node or leaf, True for a node's snapshot alone); None: nothing left."""
        while self._heap:
            key, _, node, snapshot = heapq.heappop(self._heap)
            if isinstance(node, Leaf):
                node.queued = False
                if not node.page.cached or node.page.refs or node.state.refs:
                    continue
                if self.leaf_key(node) > key:
                    self.add_leaf(node)
                    continue
            elif snapshot:
                node.snapshot_queued = False
                if node.snapshot is None or node.snapshot.refs:
                    continue
                if self.snapshot_key(node) > key:
                    self.add_snapshot(node)
                    continue
            else:
                node.queued = False
                if not node.page.cached or node.children or node.page.refs:
                    continue
                if self.page_key(node) > key:
                    self.add_page(node)
                    continue
            self.age = max(self.age, key[1])
            return node, snapshot
        return None
