"""The ways into the arena: a request gets a slot and its first pages, from the cache or from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.core.arena import Unit
from plait.core.holdings import Holdings
from plait.core.index import Leaf, Match, Node
from plait.core.plan import Copy, Kind
from plait.core.request import Request
from plait.core.reuse import Reuse
from plait.core.snapshots import SnapshotKind


class Entrance:
    """Lets requests in: ``admit`` from the cache, ``reenter`` from the swap, ``receive`` from elsewhere."""

    def __init__(self, holdings: Holdings, reuse: Reuse) -> None:
        self.holdings = holdings
        self.store = holdings.store
        self.memory = holdings.memory
        self.geometry = holdings.geometry
        self.reuse = reuse

    # -- from the cache ---------------------------------------------------------------------

    def admit(self, request: Request, match: Match) -> bool:
        """Take over what was matched and give the request a slot. False (and no change) without memory."""
        size = self.geometry.page_size
        nodes = match.nodes[: match.usable]
        for node in nodes:
            self.memory.hold(node.page)
        pages = [node.page for node in nodes]
        if self.geometry.has_state:
            own = self._restore(nodes, match.leaf)
            if own is None:
                self._let_go(nodes)
                return False
            request.slot = own[0]
            pages += own[1:]
        self.store.hit(nodes, match.leaf)
        request.pages = pages
        request.nodes = nodes
        request.num_computed_tokens = request.num_committed_tokens = match.position(size)
        request.marks = self.marks(request, known=len(match.nodes) * size)
        return True

    def _let_go(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            self.store.drop_page(node.page, node)

    def _restore(self, nodes: Sequence[Node], leaf: Leaf | None) -> list[Unit] | None:
        """A slot with the state to go on from, and with a leaf a copy of its page. None without memory."""
        snapshot = leaf.state if leaf else nodes[-1].snapshot if nodes else None
        sources = [] if snapshot is None else [snapshot, leaf.page] if leaf else [snapshot]
        for source in sources:
            self.memory.hold(source)
        own: list[Unit] = []
        for kind in (Kind.STATE, Kind.PAGE) if leaf else (Kind.STATE,):
            unit = self.store.take(kind, near=nodes[-1].page if nodes and kind is Kind.PAGE else None)
            if unit is not None:
                own.append(unit)
        complete = len(own) == (2 if leaf else 1)
        if complete:
            self._fill(own, sources)
        else:
            for unit in own:
                self.memory.release(unit)
        for source in sources:
            self.memory.drop(source)
        if leaf is not None:
            self.store.queue.add_leaf(leaf)
        elif nodes and snapshot is not None:
            self.store.queue.add_snapshot(nodes[-1])
        return own if complete else None

    def _fill(self, own: Sequence[Unit], sources: Sequence[Unit]) -> None:
        """The next plan copies the sources; without a snapshot there is nothing to copy."""
        pairs = zip(sources, own, strict=False)
        copies = [Copy(source.kind, source.index, unit.index) for source, unit in pairs]
        if copies:
            self.memory.copy(copies, "restore")
        for unit in own:
            unit.copied = self.memory.launched + 1

    def marks(self, request: Request, known: int) -> dict[int, SnapshotKind]:
        """Positions beyond the cursor of a request that enters at which snapshots are wanted.

        ``known``: tokens whose pages are cached.
        """
        if not self.reuse.takes_snapshots:
            return {}
        return self.reuse.policy.marks(
            request.num_prompt_tokens,
            found=request.num_computed_tokens,
            known=known,
            tail=request.tail,
            boundaries=request.boundaries,
        )

    def count_hit(self, request: Request) -> None:
        """For the figures: what the request, just admitted, was restored from."""
        nodes = request.nodes
        if request.num_computed_tokens > len(nodes) * self.geometry.page_size:
            kind = "leaf"
        elif not nodes:
            kind = "none"
        elif not self.geometry.has_state:
            kind = "page"
        else:
            kind = nodes[-1].snapshot_kind.name.lower()
        self.store.counters.hits[kind] += 1

    # -- from outside -----------------------------------------------------------------------

    def reenter(self, request: Request, nodes: list[Node], pages: int) -> bool:
        """Give the request the pages of ``nodes``, fresh ones up to ``pages`` in all, and a slot.

        The nodes are those of its leading pages. False (and no change) without memory.
        """
        for node in nodes:
            self.memory.hold(node.page)
        request.nodes, request.pages = nodes, [node.page for node in nodes]
        complete = self.holdings.grow(request, pages * self.geometry.page_size)
        if complete and self.geometry.has_state:
            request.slot = self.store.take(Kind.STATE)
            complete = request.slot is not None
        if not complete:
            self.holdings.release(request)
            return False
        self.store.use(nodes)
        return True

    def receive(self, request: Request, known: Sequence[Node]) -> list[Unit] | None:
        """Take over known pages, and memory for the rest of a prompt that comes from outside, slot included.

        Returns:
            The units to be written, pinned: the slot, if the model has one, then the pages behind ``known``
            in order. None (and no change) without memory.
        """
        for node in known:
            self.memory.hold(node.page)
        near = known[-1].page if known else None
        count = self.geometry.pages_for(request.num_tokens) - len(known)
        taken: list[Unit] = []
        for kind in [Kind.STATE] * self.geometry.has_state + [Kind.PAGE] * count:
            unit = self.store.take(kind, near if kind is Kind.PAGE else None)
            if unit is None:
                self.return_pinned(taken)
                self._let_go(known)
                return None
            unit.pins = 1  # at once: room for the next unit may be made by moving units
            near = unit if kind is Kind.PAGE else near
            taken.append(unit)
        request.slot = taken[0] if self.geometry.has_state else None
        request.pages = [*(node.page for node in known), *taken[self.geometry.has_state :]]
        request.nodes = list(known)
        self.store.use(known)
        return taken

    def return_pinned(self, units: Iterable[Unit]) -> None:
        """Give back units of ``receive`` that nobody writes to (any more)."""
        for unit in units:
            unit.pins = 0
            self.memory.release(unit)
