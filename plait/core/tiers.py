"""What goes to a tier, and what comes back: the scheduler's half.

A ``Tier`` moves the bytes, outside the order of steps: it reads units that are *pinned*
(neither evicted nor moved) and fills units that are *lent* (nobody else's), each only when the steps that may
still touch that memory are over. Whatever fails there costs a recomputation and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from plait.core.arena import IntegrityError, Unit
from plait.core.cache import Cache
from plait.core.index import Match, Node, pack
from plait.core.plan import Kind
from plait.core.request import Request
from plait.core.snapshots import SnapshotKind
from plait.core.tier import Item, Moved, Name, Tier

MOST_WAITING = 4096
"""Units that wait to be written; what comes beyond them is not kept."""
TOUCH_PAGES = 64
"""Without recurrent layers: pages of a growing prefix between two signs that the tier's part is in use."""
MOST_RESTORES = 2
"""Times that one request waits for its prefix; what is evicted again before it is admitted is computed."""
RESTORE_SECONDS = 10.0
"""Longest that a request waits for its prefix before it computes it."""


@dataclass(slots=True)
class TierCounters:
    """Totals since start."""

    pages_written: int = 0
    snapshots_written: int = 0
    writes_skipped: int = 0
    """units that were wanted there but evicted first, or came when too many waited"""
    pages_read: int = 0
    snapshots_read: int = 0
    reads_failed: int = 0
    restores: int = 0
    """times a request waited for its prefix"""


@dataclass(slots=True, eq=False)
class Spill:
    """A unit on its way to the tier; pinned."""

    item: Item
    node: Node
    unit: Unit
    fence: int

    @property
    def is_snapshot(self) -> bool:
        return self.item.kind is Kind.STATE


@dataclass(slots=True, eq=False)
class Restore:
    """The rest of a prefix on its way back: lent units, in the order of the prefix, the snapshot last."""

    above: Node | None
    """the deepest node of the prefix that memory has; pinned"""
    parts: list[tuple[Item, Unit]]
    fence: int
    started: float
    left: int = 0
    """reads that are not over"""
    came: dict[bytes, SnapshotKind] = field(default_factory=dict)
    """pages that were read, by key"""
    snapshot: SnapshotKind | None = None
    """why the snapshot was taken, once it was read"""


class Tiers:
    """Decides what is written to a tier and when a request waits for what is there.

    ``collect`` begins a step's planning, ``spill`` ends it; ``holds_up`` is asked in between for each waiting
    request. Both also run while there is nothing to compute.

    Args:
        cache: whose pages and snapshots are kept.
        tier: the worker's half.
        spill_bytes: most bytes of the arena that are pinned for writing at once (one unit at least).
    """

    def __init__(self, cache: Cache, tier: Tier, spill_bytes: int | None = None) -> None:
        self.cache = cache
        self.tier = tier
        arena = cache.geometry.num_slabs * cache.geometry.slab_bytes
        self.spill_bytes = min(arena // 16, 64 * 2**20) if spill_bytes is None else spill_bytes
        self.counters = TierCounters()
        self._backlog: deque[Name] = deque()
        self._fenced: deque[Spill | Restore] = deque()
        """begun, but steps may still touch their memory"""
        self._writing: dict[int, Spill] = {}
        self._reading: dict[int, tuple[Restore, Item]] = {}
        self._on_the_way_out: set[Name] = set()
        """in the backlog, fenced or being written"""
        self._on_the_way_in: dict[Name, Restore] = {}
        self._tickets = 0
        self._spilling = 0
        """bytes pinned for writing"""
        self._refusals = 0
        cache.store.on_publish = self.published

    # -- out --------------------------------------------------------------------------------

    def published(self, node: Node) -> None:
        """A hit can newly end at ``node``: it and all that leads to it is worth keeping."""
        if not self.tier.writable:
            return
        whole = node.snapshot is not None or node.depth % TOUCH_PAGES == 0
        chain = self._chain(node, whole)
        if whole:
            self._touch(chain)
        wanted = [name for name, _ in chain if not self._is_kept(name)]
        room = MOST_WAITING - len(self._backlog)
        self.counters.writes_skipped += len(wanted[room:])
        self._backlog += wanted[:room]
        self._on_the_way_out.update(wanted[:room])

    def _is_kept(self, name: Name) -> bool:
        return name in self._on_the_way_out or self.tier.has(name)

    def _chain(self, node: Node, whole: bool = True) -> list[tuple[Name, int]]:
        """What leads to a node, with depths: pages from the first on, then its snapshot.

        ``whole``: all of it; else from behind the last page that is kept.
        """
        chain = [((Kind.STATE, node.key), node.depth)] if node.snapshot is not None else []
        above: Node | None = node
        while above is not None and (whole or not self._is_kept((Kind.PAGE, above.key))):
            chain.append(((Kind.PAGE, above.key), above.depth))
            above = above.parent
        return chain[::-1]

    def _touch(self, chain: list[tuple[Name, int]]) -> None:
        known = [(name, depth) for name, depth in chain if self.tier.has(name)]
        if known:
            self.tier.touch(known)

    def used(self, request: Request) -> None:
        """The request, just admitted, goes on from what was cached."""
        if request.nodes:
            self._touch(self._chain(request.nodes[-1]))

    def spill(self) -> None:
        """Begin to write what waits, a bounded amount at a time; nothing while memory is short."""
        short = self.cache.store.refusals != self._refusals
        self._refusals = self.cache.store.refusals
        while self._backlog and not short and (not self._spilling or self._spilling < self.spill_bytes):
            kind, key = name = self._backlog.popleft()
            node = self.cache.index.nodes.get(key)
            unit = None if node is None else node.page if kind is Kind.PAGE else node.snapshot
            if node is None or unit is None or not self.tier.writable:
                self._on_the_way_out.discard(name)
                self.counters.writes_skipped += 1
                continue
            parent = node.parent.key if node.parent else b""
            item = Item(kind, node.key, parent, node.depth, node.tokens, node.snapshot_kind)
            fence = self.cache.pins.pin(node, kind is Kind.STATE)
            self._spilling += self._bytes(kind)
            self._fenced.append(Spill(item, node, unit, fence))
        self._begin()

    def _bytes(self, kind: Kind) -> int:
        geometry = self.cache.geometry
        return geometry.page_bytes if kind is Kind.PAGE else geometry.state_stride

    # -- in ---------------------------------------------------------------------------------

    def holds_up(self, request: Request, fits: Callable[[int, int], bool]) -> bool:
        """Whether the request shall wait, holding nothing, while more of its prefix is read.

        It may evict: what was matched before must be matched again.

        Args:
            fits: whether so many pages and states can be had besides what running requests need.
        """
        cache = self.cache
        size = cache.geometry.page_size
        if not cache.reuse.reads(request):
            return False
        match = cache.match(request)
        depth = self._reach(request, match)
        if depth * size <= match.position(size):
            return False
        names = [(Kind.PAGE, key) for key in request.page_keys[len(match.nodes) : depth]]
        if cache.geometry.has_state:
            names.append((Kind.STATE, request.page_keys[depth - 1]))
        for name in names:
            coming = self._on_the_way_in.get(name)
            if coming is not None:
                return time.monotonic() - coming.started < RESTORE_SECONDS
        if request.num_restores >= MOST_RESTORES or not self._has_room(request, match, fits):
            return False
        return self._restore(request, match, depth)

    def _reach(self, request: Request, match: Match) -> int:
        """Pages of the deepest position that could be hit if all that the tier has were in memory."""
        has, keys = self.tier.has, request.page_keys
        limit = self.cache.most_pages(request)
        known = len(match.nodes)
        while known < limit and has((Kind.PAGE, keys[known])):
            known += 1
        if not self.cache.geometry.has_state:
            return known
        for depth in range(known, match.usable, -1):
            if has((Kind.STATE, keys[depth - 1])):
                return depth
        return match.usable

    def _has_room(self, request: Request, match: Match, fits: Callable[[int, int], bool]) -> bool:
        """Whether the request can be admitted with its snapshot in memory: slot, snapshot and all pages."""
        geometry = self.cache.geometry
        pages = geometry.pages_for(request.num_tokens)
        states = 2 if geometry.has_state else 0
        slabs = -(-pages // geometry.slab_pages)
        if states:
            slabs += -(-states // geometry.slab_states)
        return slabs <= geometry.num_slabs and fits(self.cache.pages_wanted(request, match), states)

    def _restore(self, request: Request, match: Match, depth: int) -> bool:
        """Begin to read pages and snapshot up to ``depth``. False without memory."""
        cache, known = self.cache, len(match.nodes)
        above = match.nodes[min(known, depth) - 1] if known else None
        if above is not None:
            cache.pins.pin(above, False)
        wanted = [self._item(request, Kind.PAGE, i) for i in range(known, depth)]
        if cache.geometry.has_state:
            wanted.append(self._item(request, Kind.STATE, depth - 1))
        parts: list[tuple[Item, Unit]] = []
        fence, near = 0, above.page if above is not None else None
        for item in wanted:
            borrowed = cache.loans.borrow(item.kind, near if item.kind is Kind.PAGE else None)
            if borrowed is None:
                break
            unit, until = borrowed
            parts.append((item, unit))
            near = unit if item.kind is Kind.PAGE else near
            fence = max(fence, until)
        if len(parts) < len(wanted):
            for _, unit in parts:
                cache.loans.end(unit)
            if above is not None:
                cache.pins.unpin(above, False)
            return False
        restore = Restore(above, parts, fence, time.monotonic(), left=len(parts))
        self._on_the_way_in.update((item.name, restore) for item, _ in parts)
        self._fenced.append(restore)
        request.num_restores += 1
        self.counters.restores += 1
        self._begin()
        return True

    def _item(self, request: Request, kind: Kind, page: int) -> Item:
        size, keys = self.cache.geometry.page_size, request.page_keys
        tokens = pack(request.tokens[page * size : (page + 1) * size])
        return Item(kind, keys[page], keys[page - 1] if page else b"", page + 1, tokens)

    # -- transfers --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Hand over what no step can touch any more."""
        completed = self.cache.memory.completed
        for _ in range(len(self._fenced)):
            work = self._fenced.popleft()
            if work.fence > completed:
                self._fenced.append(work)
            elif isinstance(work, Spill):
                self._writing[self._ticket()] = work
                self.tier.write(self._tickets, work.item, work.unit.index)
            else:
                for item, unit in work.parts:
                    self._reading[self._ticket()] = (work, item)
                    self.tier.read(self._tickets, item, unit.index)

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def collect(self) -> None:
        """Take in what is over: unpin what was written, publish what was read."""
        for moved in self.tier.finished():
            if moved.ticket in self._writing:
                self._written(self._writing.pop(moved.ticket), moved.ok)
            elif moved.ticket in self._reading:
                self._read(*self._reading.pop(moved.ticket), moved)
            else:
                raise IntegrityError(f"transfer {moved.ticket} ends but never began")
        self._begin()

    def _written(self, spill: Spill, ok: bool) -> None:
        self.cache.pins.unpin(spill.node, spill.is_snapshot)
        self._spilling -= self._bytes(spill.item.kind)
        self._on_the_way_out.discard(spill.item.name)
        if not ok:
            self.counters.writes_skipped += 1
        elif spill.is_snapshot:
            self.counters.snapshots_written += 1
            if self.cache.index.nodes.get(spill.node.key) is spill.node:
                self._touch(self._chain(spill.node))  # its pages came before it, and must not go before it
        else:
            self.counters.pages_written += 1

    def _read(self, restore: Restore, item: Item, moved: Moved) -> None:
        restore.left -= 1
        if not moved.ok:
            self.counters.reads_failed += 1
        elif item.kind is Kind.STATE:
            restore.snapshot = moved.reason
        else:
            restore.came[item.key] = moved.reason
        if not restore.left:
            self._publish(restore)

    def _publish(self, restore: Restore) -> None:
        """All reads are over: what forms a prefix with what memory has is published, the rest goes back."""
        cache, node, whole = self.cache, restore.above, True
        for item, unit in restore.parts:
            del self._on_the_way_in[item.name]
            if item.kind is Kind.STATE:
                if whole and node is not None and restore.snapshot is not None:
                    cache.loans.fill_snapshot(node, unit, restore.snapshot)
                    self.counters.snapshots_read += 1
                else:
                    cache.loans.end(unit)
                continue
            whole = whole and item.key in restore.came
            if not whole:
                cache.loans.end(unit)
            elif (found := cache.loans.fill_page(node, item.key, item.tokens, unit)) is None:
                whole = False
            else:
                node = found
                self.counters.pages_read += 1
        if restore.above is not None:
            cache.pins.unpin(restore.above, False)
        if node is not None:
            cache.store.queue.add_page(node)

    # -- looking ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Something waits to be written or is on its way."""
        return bool(self._backlog or self._fenced or self._writing or self._reading)

    @property
    def in_transit(self) -> bool:
        """Something is on its way."""
        return bool(self._fenced or self._writing or self._reading)

    def check(self) -> None:
        """Raises IntegrityError: pins and loans do not agree with what is on its way."""
        spills = [*self._writing.values(), *(work for work in self._fenced if isinstance(work, Spill))]
        restores = set(self._on_the_way_in.values())
        pins = len(spills) + sum(restore.above is not None for restore in restores)
        if pins != self.cache.pins.num_readers:
            raise IntegrityError(f"{self.cache.pins.num_readers} pins by count, {pins} on their way")
        if self._spilling != sum(self._bytes(spill.item.kind) for spill in spills):
            raise IntegrityError(f"{self._spilling} bytes pinned by count")
