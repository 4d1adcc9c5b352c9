"""Preempted requests that keep what was computed for them: in a buffer beside the arena, and back.

The copies travel in step plans, in order, as moves do. So memory that was copied out may be used by the very
step that follows the copy, nobody waits, and no fence is needed: the buffer is touched by the steps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.arena import ArenaBook, IntegrityError, Unit
from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.index import Node
from plait.core.plan import Copy, Kind, Way
from plait.core.request import Image, Request


@dataclass(slots=True)
class SwapCounters:
    """Totals since start."""

    kept: int = 0
    """preempted requests that were kept in the buffer"""
    resumed: int = 0
    too_full: int = 0
    """preempted requests that did not fit there; they compute again"""
    lost: int = 0
    """kept requests that shared a page that is gone; they compute again"""
    bytes_copied: int = 0
    """out and in"""


class SwapSpace:
    """The buffer's book. It is cut like an arena.

    A request's image holds the pages that nobody else held when it was preempted, and its slot. Pages that
    others held too are found again by their keys; if one is gone, the request computes again from the last
    snapshot.

    Args:
        cache: over the arena that requests run in.
        geometry: of the buffer; pages and states as large as the arena's.
    """

    def __init__(self, cache: Cache, geometry: Geometry) -> None:
        self.cache = cache
        self.geometry = geometry
        self.book = ArenaBook(geometry)
        self.counters = SwapCounters()

    # -- out --------------------------------------------------------------------------------

    def keep(self, request: Request) -> None:
        """The request is about to leave the arena: copy what it alone holds. Nothing if there is no room.

        It runs, or has come from another engine; no outside actor writes to what it holds.
        """
        count = self.cache.geometry.pages_for(request.num_computed_tokens)
        if not count:
            return
        private = [i for i, page in enumerate(request.pages[:count]) if page.refs - page.readers == 1]
        places = self._take(len(private), request.slot is not None)
        if places is None:
            self.counters.too_full += 1
            return
        slot = places.pop() if request.slot is not None else None
        image = Image(
            epoch=request.epoch,
            cursor=request.num_computed_tokens,
            committed=request.num_committed_tokens,
            num_pages=count,
            pages=dict(zip(private, places, strict=True)),
            slot=slot,
        )
        for number, place in image.pages.items():
            self._copy(Way.OUT, request.pages[number], place)
        if request.slot is not None and slot is not None:
            self._copy(Way.OUT, request.slot, slot)
        request.image = image
        self.counters.kept += 1

    def _take(self, pages: int, state: bool) -> list[Unit] | None:
        """Units of the buffer, pages first. None (and no change) if they do not all fit."""
        taken: list[Unit] = []
        for kind in [Kind.PAGE] * pages + [Kind.STATE] * state:
            unit = self.book.take(kind, taken[-1] if taken and kind is Kind.PAGE else None)
            if unit is None:
                self._give(taken)
                return None
            unit.refs = 1
            taken.append(unit)
        return taken

    def _give(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.refs = 0
            self.book.give(unit, 0)

    def _copy(self, way: Way, unit: Unit, place: Unit) -> None:
        source, target = (unit, place) if way is Way.OUT else (place, unit)
        self.cache.memory.copies.append(Copy(unit.kind, source.index, target.index, way))
        if way is Way.IN:
            unit.copied = self.cache.memory.launched + 1
        geometry = self.geometry
        size = geometry.page_bytes if unit.kind is Kind.PAGE else geometry.state_bytes
        self.counters.bytes_copied += size

    def drop(self, request: Request) -> None:
        """The request does not need its image (any more)."""
        image, request.image = request.image, None
        if image is not None:
            request.num_awaited = 0
            self._give([*image.pages.values(), *([image.slot] if image.slot is not None else [])])

    # -- in ---------------------------------------------------------------------------------

    def is_usable(self, request: Request) -> bool:
        """Whether the request can go on from its image. If never, the image is dropped."""
        image = request.image
        if image is None:
            return False
        known = len(self._known(request, image))
        if all(i in image.pages for i in range(known, image.num_pages)):
            return True
        self.counters.lost += 1
        request.prompt_logprobs.clear()
        self.drop(request)
        return False

    def _known(self, request: Request, image: Image) -> list[Node]:
        """Nodes of its leading full pages, as far as they are cached."""
        cache = self.cache
        pages = cache.reuse.limit(request, image.committed) // self.geometry.page_size
        if not cache.reuse.enabled or not pages:
            return []
        cache.index.extend_keys(request.page_keys, request.tokens, request.cache_salt, pages)
        return cache.index.match(request.page_keys, request.tokens, pages).nodes

    def resume(self, request: Request, end: int) -> bool:
        """Bring the request back, with pages for positions below ``end``. False without memory."""
        image = request.image
        assert image is not None
        nodes = self._known(request, image)
        if not self.cache.entrance.reenter(request, nodes, self.cache.geometry.pages_for(end)):
            return False
        for number in range(len(nodes), image.num_pages):
            self._copy(Way.IN, request.pages[number], image.pages[number])
        if request.slot is not None and image.slot is not None:
            self._copy(Way.IN, request.slot, image.slot)
        request.num_computed_tokens = request.num_committed_tokens = image.cursor
        self.drop(request)
        self.counters.resumed += 1
        return True

    # -- checking ---------------------------------------------------------------------------

    def check(self, requests: Sequence[Request]) -> None:
        """Raises IntegrityError: a unit of the buffer is nobody's, or two requests'."""
        self.book.check()
        held: list[Unit] = []
        for request in requests:
            if request.image is not None:
                held += request.image.pages.values()
                held += [request.image.slot] if request.image.slot is not None else []
        units = [unit for kind in Kind for unit in self.book.units[kind].values()]
        if {id(unit) for unit in held} != {id(unit) for unit in units} or len(held) != len(units):
            raise IntegrityError(f"{len(units)} units of the swap buffer are taken, images hold {len(held)}")
