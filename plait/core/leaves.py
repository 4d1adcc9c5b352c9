"""Where answers end: the slot and the partly filled page of an ended request become a leaf of the index.

The next turn of a conversation that repeats the answer word for word goes on from there. Nothing is copied:
slot and page change hands.
"""

from __future__ import annotations

from plait.core.holdings import Holdings
from plait.core.index import Leaf, pack
from plait.core.request import Request
from plait.core.reuse import Reuse
from plait.core.snapshots import SnapshotKind


class Leaves:
    """Lets ended requests out of the arena, and keeps where they stood."""

    def __init__(self, holdings: Holdings, reuse: Reuse) -> None:
        self.holdings = holdings
        self.store = holdings.store
        self.geometry = holdings.geometry
        self.reuse = reuse

    def must_wait(self, request: Request) -> bool:
        """Whether an ended request stays until the step in flight for it is over, since its slot is kept."""
        return request.in_flight and self._leaves_leaf(request)

    def _leaves_leaf(self, request: Request) -> bool:
        """Whether its slot, as the last launched step leaves it, is the state behind known tokens.

        That step may have been launched before its request was known to have ended: then the state has
        moved on over the token that ended it. Two steps on, it holds tokens that are nobody's.
        """
        return (
            self.reuse.enabled
            and self.reuse.row_invariant
            and request.slot is not None
            and self.geometry.state_grid == 1
            and request.num_prompt_tokens < request.num_computed_tokens <= request.num_tokens
        )

    def retire(self, request: Request) -> None:
        """The request has ended by itself: its slot becomes the snapshot of where it ended, and it leaves."""
        size, end = self.geometry.page_size, request.num_committed_tokens
        keeps = not request.in_flight and self._leaves_leaf(request) and len(request.nodes) == end // size
        if keeps and end % size:
            self._leave_leaf(request, end)
        elif keeps and request.nodes[-1].snapshot is None:
            assert request.slot is not None
            self.store.attach(request.nodes[-1], request.slot, SnapshotKind.LEAF)
            request.slot = None
        self.holdings.release(request)

    def _leave_leaf(self, request: Request, end: int) -> None:
        assert request.slot is not None
        depth = end // self.geometry.page_size
        parent = request.nodes[-1] if request.nodes else None
        under = parent.key if parent else self.store.index.seed(request.cache_salt)
        tokens = pack(request.tokens[depth * self.geometry.page_size : end])
        leaf = Leaf(under, parent, tokens, request.pages[depth], request.slot)
        if self.store.add_leaf(leaf):
            del request.pages[depth]
            request.slot = None
