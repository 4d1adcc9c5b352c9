"""One cache for attention and recurrent state: what a request holds, what is kept, what is dropped.

The scheduler asks ``match`` and ``admit`` when a request enters, ``grow`` as its cursor moves, ``export``
for snapshots, ``commit`` when a step is over and ``release`` when the request leaves the arena.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from plait.core.arena import ArenaBook, IntegrityError, Unit
from plait.core.eviction import EvictionQueue
from plait.core.geometry import Geometry
from plait.core.index import Leaf, Match, Node, PrefixIndex, pack
from plait.core.plan import Copy, Kind
from plait.core.request import PendingExport, Request, Status
from plait.core.snapshots import SnapshotKind, SnapshotPolicy


@dataclass(slots=True)
class CacheCounters:
    """Totals since start."""

    hits: Counter[str] = field(default_factory=Counter)
    """admissions by kind of the snapshot they restored ("page": attention alone, "none": no hit)"""
    snapshots_taken: Counter[str] = field(default_factory=Counter)
    snapshots_evicted: int = 0
    pages_evicted: int = 0
    units_moved: int = 0
    exports_skipped: int = 0
    """snapshots that were wanted but found no memory"""
    copied_bytes: Counter[str] = field(default_factory=Counter)
    """bytes written by copying: "snapshot" (states exported), "restore" (what a hit goes on from), "move" """


class Cache:
    """Pages, states and the prefix index over one arena.

    Args:
        geometry: how the arena is cut.
        policy: where snapshots are taken.
        numerics_id: names everything that changes bits; seeds the hash chains.
        enabled: False keeps nothing for other requests.
        row_invariant: entries written while decoding equal those a prefill would write, and may be
            shared; otherwise only a prompt's own pages are.
        budget: most bytes of what is cached and held by no request; None: as much as there is room for.
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: SnapshotPolicy | None = None,
        *,
        numerics_id: str = "",
        enabled: bool = True,
        row_invariant: bool = True,
        budget: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.policy = policy or SnapshotPolicy.of(geometry)
        self.enabled = enabled
        self.row_invariant = row_invariant
        self.budget = budget
        self.book = ArenaBook(geometry)
        self.index = PrefixIndex(geometry.page_size, numerics_id, geometry.has_state)
        self.launched = 0
        """last step handed to the worker"""
        self.copies: list[Copy] = []
        """copies that the next plan must carry, in order"""
        self.queue = EvictionQueue(geometry)
        self.counters = CacheCounters()
        self.num_snapshots = 0
        self.num_pending = 0
        """exports in flight"""
        self.num_readers = 0
        """reads by outside actors"""
        self.moved = 0
        """last step that moves units of others"""
        self.on_publish: Callable[[Node], None] | None = None
        """told of each node that a hit can newly end at"""
        self.refusals = 0
        """times that no memory could be had"""
        self._clock = 0
        self._referenced = [0, 0]
        self._lent = [0, 0]
        self._quarantined = [0, 0]

    # -- entering ---------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """What is known of the request's tokens, leaving at least one to compute."""
        if not (self.enabled and request.reads_cache):
            return Match([], 0)
        pages = self.most_pages(request)
        self.index.extend_keys(request.page_keys, request.tokens, request.cache_salt, pages)
        root = self.index.seed(request.cache_salt) if self.index.leaves else b""
        return self.index.match(request.page_keys, request.tokens, pages, root)

    def most_pages(self, request: Request) -> int:
        """Full pages that the request could find cached at most: those before the last that it computes."""
        return min(request.num_tokens - 1, request.goal) // self.geometry.page_size

    def common_prefix(self, a: Request, b: Request) -> int:
        """Tokens of the longest prefix of both that could be shared, by the hash chains known so far."""
        low, high = 0, min(len(a.page_keys), len(b.page_keys))
        while low < high:  # equal keys mean equal prefixes
            middle = (low + high + 1) // 2
            if a.page_keys[middle - 1] == b.page_keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return self.policy.floor(low * self.geometry.page_size)

    def pages_wanted(self, request: Request, match: Match) -> int:
        """Pages that would become referenced to hold all its tokens."""
        shared = sum(1 for node in match.nodes[: match.usable] if node.page.refs)
        return self.geometry.pages_for(request.num_tokens) - shared

    def admit(self, request: Request, match: Match) -> bool:
        """Take over what was matched and give the request a slot. False (and no change) without memory."""
        size = self.geometry.page_size
        nodes = match.nodes[: match.usable]
        for node in nodes:
            self._hold(node.page)
        pages = [node.page for node in nodes]
        if self.geometry.has_state:
            own = self._restore(nodes, match.leaf)
            if own is None:
                for node in reversed(nodes):
                    self._drop_page(node.page, node)
                return False
            request.slot = own[0]
            pages += own[1:]
        self._touch(nodes, match.leaf)
        request.pages = pages
        request.nodes = nodes
        request.num_computed_tokens = request.num_committed_tokens = match.position(size)
        request.marks = self.marks(request, known=len(match.nodes) * size)
        return True

    def marks(self, request: Request, known: int) -> dict[int, SnapshotKind]:
        """Positions beyond the cursor of a request that enters at which snapshots are wanted.

        ``known``: tokens whose pages are cached.
        """
        if not (self.enabled and self.geometry.has_state):
            return {}
        return self.policy.marks(
            request.num_prompt_tokens,
            found=request.num_computed_tokens,
            known=known,
            tail=request.tail,
            boundaries=request.boundaries,
        )

    def reenter(self, request: Request, nodes: list[Node], pages: int) -> bool:
        """Give the request the pages of ``nodes``, fresh ones up to ``pages`` in all, and a slot.

        The nodes are those of its leading pages. False (and no change) without memory.
        """
        for node in nodes:
            self._hold(node.page)
        request.nodes, request.pages = nodes, [node.page for node in nodes]
        complete = self.grow(request, pages * self.geometry.page_size)
        if complete and self.geometry.has_state:
            request.slot = self._take(Kind.STATE)
            complete = request.slot is not None
        if not complete:
            self.release(request)
            return False
        self._clock += 1
        for node in nodes:
            node.used, node.age = self._clock, self.queue.age
        return True

    def _restore(self, nodes: Sequence[Node], leaf: Leaf | None) -> list[Unit] | None:
        """A slot with the state to go on from, and with a leaf a copy of its page. None without memory."""
        snapshot = leaf.state if leaf else nodes[-1].snapshot if nodes else None
        sources = [] if snapshot is None else [snapshot, leaf.page] if leaf else [snapshot]
        for source in sources:
            self._hold(source)
        own: list[Unit] = []
        for kind in (Kind.STATE, Kind.PAGE) if leaf else (Kind.STATE,):
            unit = self._take(kind, near=nodes[-1].page if nodes and kind is Kind.PAGE else None)
            if unit is not None:
                own.append(unit)
        complete = len(own) == (2 if leaf else 1)
        if complete:
            pairs = zip(sources, own, strict=False)  # without a snapshot there is nothing to copy
            copies = [Copy(source.kind, source.index, unit.index) for source, unit in pairs]
            if copies:
                self._copy(copies, "restore")
            for unit in own:
                unit.copied = self.launched + 1
        else:
            for unit in own:
                self._drop_unit(unit)
        for source in sources:
            self._drop_ref(source)
        if leaf is not None:
            self.queue.add_leaf(leaf)
        elif nodes and snapshot is not None:
            self.queue.add_snapshot(nodes[-1])
        return own if complete else None

    def _touch(self, nodes: Sequence[Node], leaf: Leaf | None) -> None:
        self._clock += 1
        for node in nodes:
            node.used = self._clock
            node.age = self.queue.age
        if leaf is not None:
            leaf.hits += 1
            self.queue.leaves_hit += 1
            leaf.used, leaf.age = self._clock, self.queue.age
        elif nodes:
            last = nodes[-1]
            last.snapshot_hits += 1
            last.snapshot_used, last.snapshot_age = self._clock, self.queue.age

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
        self.counters.hits[kind] += 1

    # -- growing ----------------------------------------------------------------------------

    def grow(self, request: Request, end: int) -> bool:
        """Pages for positions below ``end``. What could be had is kept even when the answer is False."""
        while len(request.pages) * self.geometry.page_size < end:
            page = self._take(Kind.PAGE, near=request.pages[-1] if request.pages else None)
            if page is None:
                return False
            request.pages.append(page)
        return True

    def page_table(self, request: Request, end: int) -> tuple[int, ...]:
        """Indices of the pages that hold positions below ``end``. To be read when a plan is frozen."""
        count = self.geometry.pages_for(end)
        if len(request.table) != count or request.table_moves != self.counters.units_moved:
            request.table = tuple([page.index for page in request.pages[:count]])
            request.table_moves = self.counters.units_moved
        return request.table

    def exports(self, request: Request, start: int, end: int) -> list[PendingExport]:
        """Room for the snapshots that a chunk from ``start`` to ``end`` should take.

        A snapshot that finds no memory is skipped: nothing is preempted for it.
        """
        if not (self.enabled and self.geometry.has_state):
            return []
        if not self.row_invariant:
            end = min(end, request.num_prompt_tokens)
        pending = []
        for position, kind in self.policy.due(request.marks, start, end):
            if position <= request.num_tokens and self._has_snapshot(request, position):
                continue  # behind an awaited token nobody knows yet what is there
            state = self._take(Kind.STATE)
            if state is None:
                self.counters.exports_skipped += 1
                continue
            self.num_pending += 1
            self.counters.copied_bytes["snapshot"] += self.geometry.state_bytes
            pending.append(PendingExport(position, state, kind))
        return pending

    def _has_snapshot(self, request: Request, position: int) -> bool:
        depth = position // self.geometry.page_size
        if depth <= len(request.nodes):
            return request.nodes[depth - 1].snapshot is not None
        self.index.extend_keys(request.page_keys, request.tokens, request.cache_salt, depth)
        node = self.index.nodes.get(request.page_keys[depth - 1])
        return node is not None and node.snapshot is not None

    def commit(self, request: Request, exports: Iterable[PendingExport]) -> None:
        """The step that moved ``num_committed_tokens`` is over: publish what it wrote."""
        if self.enabled:
            self._publish_pages(request)
        for export in exports:
            self._publish_snapshot(request, export)
        self._keep_to_budget()

    def _publish_pages(self, request: Request) -> None:
        limit = request.num_committed_tokens
        if not self.row_invariant:
            limit = min(limit, request.num_prompt_tokens)
        pages = limit // self.geometry.page_size
        if pages <= len(request.nodes):
            return
        self.index.extend_keys(request.page_keys, request.tokens, request.cache_salt, pages)
        self._clock += 1
        for i in range(len(request.nodes), pages):
            parent = request.nodes[-1] if request.nodes else None
            key = request.page_keys[i]
            node = self.index.lookup(key, parent, request.tokens, i)
            if node is None:
                node = self.index.insert(key, parent, request.tokens, i, request.pages[i])
                if node is None:
                    return  # a hash collision: this prefix stays private
            elif node.page is not request.pages[i]:
                self._hold(node.page)  # published twice: adopt the elder
                self._drop_page(request.pages[i], None)
                request.pages[i] = node.page
                request.table = ()
            node.used, node.age = self._clock, self.queue.age
            request.nodes.append(node)
        if self.on_publish is not None and not self.geometry.has_state:
            self.on_publish(request.nodes[-1])

    def _publish_snapshot(self, request: Request, export: PendingExport) -> None:
        depth = export.position // self.geometry.page_size
        node = request.nodes[depth - 1] if depth <= len(request.nodes) else None
        self.num_pending -= 1
        if node is None or node.snapshot is not None:
            self._drop_unit(export.state)
            return
        if node.depth * self.geometry.page_size != export.position:
            raise IntegrityError(f"a snapshot at {export.position} under a key of another length")
        self._attach(node, export.state, export.kind)

    def _attach(self, node: Node, state: Unit, kind: SnapshotKind) -> None:
        """A state that a request held becomes the snapshot of a node."""
        state.cached = True
        self._drop_ref(state)
        self._set_snapshot(node, state, kind)
        self.counters.snapshots_taken[kind.name.lower()] += 1
        if self.on_publish is not None:
            self.on_publish(node)

    def _set_snapshot(self, node: Node, state: Unit, kind: SnapshotKind) -> None:
        node.snapshot = state
        node.snapshot_kind = kind
        node.snapshot_hits = 0
        node.snapshot_used, node.snapshot_age = self._clock, self.queue.age
        self.num_snapshots += 1
        self.queue.add_snapshot(node)

    # -- leaving ----------------------------------------------------------------------------

    def _leaves_leaf(self, request: Request) -> bool:
        """Whether its slot, as the last launched step leaves it, is the state behind known tokens.

        That step may have been launched before its request was known to have ended: then the state has
        moved on over the token that ended it. Two steps on, it holds tokens that are nobody's.
        """
        return (
            self.enabled
            and self.row_invariant
            and request.slot is not None
            and self.geometry.state_grid == 1
            and request.num_prompt_tokens < request.num_computed_tokens <= request.num_tokens
        )

    def must_wait(self, request: Request) -> bool:
        """Whether an ended request stays until the step in flight for it is over, since its slot is kept."""
        return request.in_flight and self._leaves_leaf(request)

    def retire(self, request: Request) -> None:
        """The request has ended by itself: its slot becomes the snapshot of where it ended, then it leaves.

        The next turn of a conversation that repeats the answer word for word goes on from there. Nothing is
        copied: the slot and the partly filled page change hands.
        """
        size, end = self.geometry.page_size, request.num_committed_tokens
        keeps = not request.in_flight and self._leaves_leaf(request) and len(request.nodes) == end // size
        if keeps and end % size:
            self._leave_leaf(request, end)
        elif keeps and request.nodes[-1].snapshot is None:
            assert request.slot is not None
            self._attach(request.nodes[-1], request.slot, SnapshotKind.LEAF)
            request.slot = None
        self.release(request)

    def _leave_leaf(self, request: Request, end: int) -> None:
        assert request.slot is not None
        depth = end // self.geometry.page_size
        parent = request.nodes[-1] if request.nodes else None
        under = parent.key if parent else self.index.seed(request.cache_salt)
        tokens = pack(request.tokens[depth * self.geometry.page_size : end])
        leaf = Leaf(under, parent, tokens, request.pages[depth], request.slot)
        if not self.index.add_leaf(leaf):
            return
        del request.pages[depth]
        request.slot = None
        self._drop_ref(leaf.page)
        self._drop_ref(leaf.state)
        self._clock += 1
        leaf.used, leaf.age = self._clock, self.queue.age
        self.num_snapshots += 1
        self.queue.leaves_made += 1
        self.counters.snapshots_taken["leaf"] += 1
        self.queue.add_leaf(leaf)

    def release(self, request: Request) -> None:
        """The request leaves the arena (finished, cancelled or preempted)."""
        for i in range(len(request.pages) - 1, -1, -1):
            node = request.nodes[i] if i < len(request.nodes) else None
            self._drop_page(request.pages[i], node)
        if request.slot is not None:
            self._drop_unit(request.slot)
        request.pages, request.nodes, request.slot, request.table = [], [], None, ()
        self._keep_to_budget()

    def drop_exports(self, exports: Iterable[PendingExport]) -> None:
        """The request of these exports is gone: their memory is free for the next step."""
        for export in exports:
            self.num_pending -= 1
            self._drop_unit(export.state)

    # -- outside actors ---------------------------------------------------------------------

    def lend(self, kind: Kind) -> Unit | None:
        """Memory for an actor outside the order of steps; none that a step in flight may touch."""
        unit = self.book.lend(kind)
        if unit is not None:
            self._lent[kind] += 1
        return unit

    def end_loan(self, unit: Unit) -> None:
        """The actor is done and the memory is known to be quiet."""
        self._take_back(unit)
        self.book.give(unit, self.fence)

    def _take_back(self, unit: Unit) -> None:
        self.book.end_loan(unit)
        self._lent[unit.kind] -= 1

    def borrow(self, kind: Kind, near: Unit | None = None) -> tuple[Unit, int] | None:
        """As ``lend``, but room is made for it.

        Returns:
            The unit, and the step that must be over before the actor touches it. None without memory.
        """
        unit = self._take(kind, near)
        if unit is None:
            return None
        self._drop_ref(unit)
        self.book.begin_loan(unit)
        self._lent[kind] += 1
        return unit, self.book.quiet_after(unit)

    def fill_page(self, parent: Node | None, key: bytes, packed: bytes, unit: Unit) -> Node | None:
        """A lent page that now holds what ``key`` says becomes cached; this ends the loan.

        Returns:
            The node of these tokens: a new one, or one that was published meanwhile. None: the key stands for
            other tokens.
        """
        node = self.index.find(key, parent, packed)
        if node is not None or (node := self.index.add(key, parent, packed, unit)) is None:
            self.end_loan(unit)
            return node
        self._take_back(unit)
        node.used, node.age = self._clock, self.queue.age
        return node

    def fill_snapshot(self, node: Node, unit: Unit, kind: SnapshotKind) -> None:
        """A lent state that now holds what the node's key says becomes its snapshot; this ends the loan."""
        if node.snapshot is not None:
            self.end_loan(unit)
            return
        self._take_back(unit)
        unit.cached = True
        self._set_snapshot(node, unit, kind)

    def pin(self, node: Node, snapshot: bool) -> int:
        """Keep a page, or a snapshot and the page before it, where it is while an outside actor reads it.

        Returns:
            The step that must be over before it is read: it may be moving right now.
        """
        for unit in self._read_with(node, snapshot):
            self._hold(unit)
            unit.readers += 1
        self.num_readers += 1
        return self.moved

    def unpin(self, node: Node, snapshot: bool) -> None:
        """The actor has read it."""
        self.num_readers -= 1
        for unit in self._read_with(node, snapshot):
            unit.readers -= 1
            if self._drop_ref(unit) and unit is node.snapshot:
                self.queue.add_snapshot(node)
        if not node.page.refs:
            self.queue.add_page(node)
        self._keep_to_budget()

    @staticmethod
    def _read_with(node: Node, snapshot: bool) -> list[Unit]:
        if not snapshot:
            return [node.page]
        assert node.snapshot is not None
        return [node.page, node.snapshot]

    def receive(self, request: Request, known: Sequence[Node]) -> list[Unit] | None:
        """Take over known pages, and memory for the rest of a prompt that comes from outside, slot included.

        Returns:
            The units to be written, pinned: the slot, if the model has one, then the pages behind ``known``
            in order. None (and no change) without memory.
        """
        for node in known:
            self._hold(node.page)
        near = known[-1].page if known else None
        count = self.geometry.pages_for(request.num_tokens) - len(known)
        taken: list[Unit] = []
        for kind in [Kind.STATE] * self.geometry.has_state + [Kind.PAGE] * count:
            unit = self._take(kind, near if kind is Kind.PAGE else None)
            if unit is None:
                self.return_pinned(taken)
                for node in reversed(known):
                    self._drop_page(node.page, node)
                return None
            unit.pins = 1  # at once: room for the next unit may be made by moving units
            near = unit if kind is Kind.PAGE else near
            taken.append(unit)
        request.slot = taken[0] if self.geometry.has_state else None
        request.pages = [*(node.page for node in known), *taken[self.geometry.has_state :]]
        request.nodes = list(known)
        self._clock += 1
        for node in known:
            node.used, node.age = self._clock, self.queue.age
        return taken

    def return_pinned(self, units: Iterable[Unit]) -> None:
        """Give back units of ``receive`` that nobody writes to (any more)."""
        for unit in units:
            unit.pins = 0
            self._drop_unit(unit)

    def quarantine(self, units: Iterable[Unit]) -> None:
        """Set units of ``receive`` aside that may be written to though nobody waits for it any more."""
        for unit in units:
            unit.pins = 0
            self._drop_ref(unit)
            self.book.begin_loan(unit)
            self._lent[unit.kind] += 1
            self._quarantined[unit.kind] += 1

    def end_quarantine(self, units: Iterable[Unit]) -> None:
        """The outside actor is known to be done with them."""
        for unit in units:
            self._quarantined[unit.kind] -= 1
            self.end_loan(unit)

    # -- memory -----------------------------------------------------------------------------

    @property
    def fence(self) -> int:
        """Last step that may touch a unit given back now: copies waiting for the next plan count."""
        return self.launched + 1 if self.copies else self.launched

    @property
    def memory_is_coming(self) -> bool:
        """Memory is held by an export in flight or an outside actor and will return.

        What is quarantined will return too, but nobody can say when.
        """
        return bool(self.num_pending or self.num_readers) or sum(self._lent) > sum(self._quarantined)

    def available_pages(self, more_states: int = 0) -> int:
        """Pages that are free or evictable once ``more_states`` further slots were handed out."""
        geometry = self.geometry
        slabs = geometry.num_slabs
        if geometry.has_state:
            states = self._referenced[Kind.STATE] + self._lent[Kind.STATE] + more_states
            slabs -= -(-states // geometry.slab_states)
        return slabs * geometry.slab_pages - self._referenced[Kind.PAGE] - self._lent[Kind.PAGE]

    def _take(self, kind: Kind, near: Unit | None = None) -> Unit | None:
        while (unit := self.book.take(kind, near)) is None:
            if not self._make_room(kind):
                self.refusals += 1
                return None
        unit.refs = 1
        self._referenced[kind] += 1
        return unit

    def _make_room(self, kind: Kind) -> bool:
        """Evict what cannot be hit; else empty a slab by moving what it holds; else evict the oldest."""
        if self.geometry.has_state and not self.queue.has_useless:
            other = Kind.STATE if kind is Kind.PAGE else Kind.PAGE
            copies = self.book.vacate(other, self.launched + 1)
            if copies:
                self._copy(copies, "move")
                self.moved = self.launched + 1
                self.counters.units_moved += len(copies)
                return True
        return self._evict_one()

    def _copy(self, copies: Sequence[Copy], why: str) -> None:
        """The next plan carries these copies."""
        self.copies += copies
        sizes = {Kind.PAGE: self.geometry.page_bytes, Kind.STATE: self.geometry.state_bytes}
        self.counters.copied_bytes[why] += sum(sizes[copy.kind] for copy in copies)

    def _hold(self, unit: Unit) -> None:
        unit.refs += 1
        if unit.refs == 1:
            self._referenced[unit.kind] += 1

    def _drop_ref(self, unit: Unit) -> bool:
        """One owner less; True when no request is left."""
        unit.refs -= 1
        if unit.refs:
            return False
        self._referenced[unit.kind] -= 1
        return True

    def _drop_page(self, page: Unit, node: Node | None) -> None:
        if not self._drop_ref(page):
            return
        if not page.cached:
            self.book.give(page, self.fence)
        elif node is not None:
            self.queue.add_page(node)

    def _drop_unit(self, unit: Unit) -> None:
        """Of a unit that the index does not hold."""
        if self._drop_ref(unit):
            self.book.give(unit, self.fence)

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
        self.book.give(leaf.page, self.fence)
        self.book.give(leaf.state, self.fence)
        self.num_snapshots -= 1
        self.counters.snapshots_evicted += 1
        self.counters.pages_evicted += 1
        if leaf.parent is not None:
            self.queue.add_page(leaf.parent)

    def _forget_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        node.snapshot.cached = False
        self.book.give(node.snapshot, self.fence)
        node.snapshot = None
        self.num_snapshots -= 1
        self.counters.snapshots_evicted += 1

    def _evict_node(self, node: Node) -> None:
        if node.snapshot is not None:
            self._forget_snapshot(node)
        self.index.remove(node)
        self.book.give(node.page, self.fence)
        self.counters.pages_evicted += 1
        if node.parent is not None:
            self.queue.add_page(node.parent)

    @property
    def cached_bytes(self) -> int:
        """Bytes of what is cached and held by no request."""
        usage = self.usage()
        geometry = self.geometry
        return usage["pages_cached"] * geometry.page_bytes + usage["states_cached"] * geometry.state_stride

    def _keep_to_budget(self) -> None:
        if self.budget is not None:
            while self.cached_bytes > self.budget and self._evict_one():
                pass

    def reset_prefixes(self) -> None:
        """Drop everything that no request holds."""
        while self._evict_one():
            pass

    # -- looking ----------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Units by state; ``pages_total`` counts the whole arena in pages."""
        geometry, book = self.geometry, self.book
        pages, states = len(book.units[Kind.PAGE]), len(book.units[Kind.STATE])
        return {
            "pages_total": geometry.num_pages,
            "pages_free": book.free_pages(),
            "pages_used": self._referenced[Kind.PAGE],
            "pages_lent": self._lent[Kind.PAGE],
            "pages_cached": pages - self._referenced[Kind.PAGE] - self._lent[Kind.PAGE],
            "pages_as_states": book.slabs_of[Kind.STATE] * geometry.slab_pages,
            "states_used": self._referenced[Kind.STATE],
            "states_lent": self._lent[Kind.STATE],
            "states_cached": states - self._referenced[Kind.STATE] - self._lent[Kind.STATE],
        }

    def check(self, requests: Iterable[Request], exports: Iterable[PendingExport]) -> None:
        """Recount every reference from its owners.

        Args:
            requests: all requests that may hold memory.
            exports: all exports in flight.

        Raises:
            IntegrityError: something is leaked, freed twice, held by nobody or out of place.
        """
        self.book.check()
        refs: Counter[int] = Counter()
        exports = list(exports)
        for request in requests:
            self._check_request(request)
            refs.update(id(page) for page in request.pages)
            if request.slot is not None:
                refs[id(request.slot)] += 1
        refs.update(id(export.state) for export in exports)
        if len(exports) != self.num_pending:
            raise IntegrityError(f"{self.num_pending} exports in flight by count, {len(exports)} found")
        held = [id(unit) for _, unit in self.index.check()]
        cached = set(held)
        if len(cached) != len(held):
            raise IntegrityError("the index holds a unit twice")
        referenced = [0, 0]
        for units in self.book.units:
            for unit in units.values():
                if unit.refs != refs.pop(id(unit), 0) + unit.readers:
                    raise IntegrityError(f"{unit} does not have that many owners")
                if unit.cached != (id(unit) in cached):
                    raise IntegrityError(f"{unit} is marked cached against the index")
                referenced[unit.kind] += unit.refs > 0
        if refs:
            raise IntegrityError(f"{len(refs)} units are held but were given back")
        if referenced != self._referenced:
            raise IntegrityError(f"{self._referenced} referenced by count, {referenced} found")
        self._check_sum()

    def _check_request(self, request: Request) -> None:
        if not 0 <= request.num_committed_tokens <= request.num_computed_tokens <= request.length:
            raise IntegrityError(f"request {request.id}: the cursor is out of range")
        if request.num_committed_tokens > request.num_tokens:
            raise IntegrityError(f"request {request.id}: tokens are committed that nobody knows")
        if request.status in (Status.WAITING, Status.FINISHED):
            if request.pages or request.slot is not None or request.nodes:
                raise IntegrityError(f"request {request.id} holds memory without running")
            return
        if len(request.pages) * self.geometry.page_size < request.num_computed_tokens:
            raise IntegrityError(f"request {request.id}: pages end before its cursor")
        if (request.slot is not None) != self.geometry.has_state:
            raise IntegrityError(f"request {request.id}: a slot too many or too few")
        for node, page in zip(request.nodes, request.pages, strict=False):
            if node.page is not page:
                raise IntegrityError(f"request {request.id} holds another page than its node")

    def _check_sum(self) -> None:
        usage = self.usage()
        parts = ("pages_free", "pages_used", "pages_lent", "pages_cached", "pages_as_states")
        if sum(usage[part] for part in parts) != usage["pages_total"]:
            raise IntegrityError(f"the parts of the arena do not add up: {usage}")
        if self.book.fenced_pages() > usage["pages_free"]:
            raise IntegrityError("more pages are fenced than free")
        snapshots = sum(node.snapshot is not None for node in self.index.nodes.values())
        snapshots += sum(len(beside) for beside in self.index.leaves.values())
        pinned = sum(unit.readers > 0 for unit in self.book.units[Kind.STATE].values())
        if not snapshots == self.num_snapshots == usage["states_cached"] + pinned:
            raise IntegrityError(f"{self.num_snapshots} snapshots by count, {snapshots} found")
