"""Which unit of the arena is whose: owners are counted, loans too, and the copies of the next plan collected.

What a unit holds and whether it is worth keeping is not known here; memory that cannot be had is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from plait.core.arena import ArenaBook, IntegrityError, Unit
from plait.core.counters import CacheCounters
from plait.core.geometry import Geometry
from plait.core.plan import Copy, Kind


class Memory:
    """The arena's book, with owners.

    Args:
        geometry: how the arena is cut.
        counters: where moves and copied bytes are counted.
    """

    def __init__(self, geometry: Geometry, counters: CacheCounters) -> None:
        self.geometry = geometry
        self.counters = counters
        self.book = ArenaBook(geometry)
        self.launched = 0
        """last step handed to the worker"""
        self.copies: list[Copy] = []
        """copies that the next plan must carry, in order"""
        self.moved = 0
        """last step that moves units of others"""
        self._referenced = [0, 0]
        self._lent = [0, 0]

    # -- owners -----------------------------------------------------------------------------

    def take(self, kind: Kind, near: Unit | None = None) -> Unit | None:
        """A free unit, with one owner. None: there is none."""
        unit = self.book.take(kind, near)
        if unit is not None:
            unit.refs = 1
            self._referenced[kind] += 1
        return unit

    def hold(self, unit: Unit) -> None:
        """One owner more."""
        unit.refs += 1
        if unit.refs == 1:
            self._referenced[unit.kind] += 1

    def drop(self, unit: Unit) -> bool:
        """One owner less. True when none is left: then the unit is the index's, or must be given back."""
        unit.refs -= 1
        if unit.refs:
            return False
        self._referenced[unit.kind] -= 1
        return True

    def give(self, unit: Unit) -> None:
        """A unit that nobody holds is free for the next step."""
        self.book.give(unit, self.fence)

    def release(self, unit: Unit) -> None:
        """One owner less of a unit that the index does not hold; without owners it is free."""
        if self.drop(unit):
            self.give(unit)

    # -- steps ------------------------------------------------------------------------------

    @property
    def fence(self) -> int:
        """Last step that may touch a unit given back now: copies waiting for the next plan count."""
        return self.launched + 1 if self.copies else self.launched

    @property
    def completed(self) -> int:
        """Last step known to be over."""
        return self.book.completed

    def complete(self, step: int) -> None:
        """All steps up to ``step`` are over."""
        self.book.complete(step)

    def launch(self, step: int) -> tuple[Copy, ...]:
        """The plan of ``step`` is frozen; gives the copies that it carries."""
        copies = tuple(self.copies)
        self.copies.clear()
        self.launched = step
        return copies

    def copy(self, copies: Sequence[Copy], why: str) -> None:
        """The next plan carries these copies."""
        self.copies += copies
        sizes = {Kind.PAGE: self.geometry.page_bytes, Kind.STATE: self.geometry.state_bytes}
        self.counters.copied_bytes[why] += sum(sizes[copy.kind] for copy in copies)

    def vacate(self, kind: Kind) -> bool:
        """Empty a slab of ``kind`` by moving what it holds into holes. False if none can be emptied so."""
        copies = self.book.vacate(kind, self.launched + 1)
        if not copies:
            return False
        self.copy(copies, "move")
        self.moved = self.launched + 1
        self.counters.units_moved += len(copies)
        return True

    # -- loans ------------------------------------------------------------------------------

    @property
    def num_lent(self) -> int:
        """Units on loan."""
        return sum(self._lent)

    def lend(self, kind: Kind) -> Unit | None:
        """A free unit that no step in flight may touch, on loan. None: there is none."""
        unit = self.book.lend(kind)
        if unit is not None:
            self._lent[kind] += 1
        return unit

    def begin_loan(self, unit: Unit) -> None:
        """A unit goes from its only owner to an outside actor."""
        self.drop(unit)
        self.book.begin_loan(unit)
        self._lent[unit.kind] += 1

    def end_loan(self, unit: Unit) -> None:
        """It comes back, and is nobody's."""
        self.book.end_loan(unit)
        self._lent[unit.kind] -= 1

    def quiet_after(self, unit: Unit) -> int:
        """The last step that may touch the unit's bytes for an earlier owner, or by a copy into it."""
        return self.book.quiet_after(unit)

    # -- looking ----------------------------------------------------------------------------

    def available_pages(self, more_states: int = 0) -> int:
        """Pages that are free or evictable once ``more_states`` further slots were handed out."""
        geometry = self.geometry
        slabs = geometry.num_slabs
        if geometry.has_state:
            states = self._referenced[Kind.STATE] + self._lent[Kind.STATE] + more_states
            slabs -= -(-states // geometry.slab_states)
        return slabs * geometry.slab_pages - self._referenced[Kind.PAGE] - self._lent[Kind.PAGE]

    def units(self) -> Iterator[Unit]:
        """All units in somebody's hands."""
        for units in self.book.units:
            yield from units.values()

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

    def check(self, owners: Counter[int], cached: Collection[int]) -> None:
        """Recount the book and every unit's owners.

        Args:
            owners: by ``id`` of the unit, without outside readers.
            cached: ``id`` of each unit that the index holds.

        Raises:
            IntegrityError: something is leaked, freed twice, held by nobody or out of place.
        """
        self.book.check()
        referenced = [0, 0]
        for unit in self.units():
            if unit.refs != owners.pop(id(unit), 0) + unit.readers:
                raise IntegrityError(f"{unit} does not have that many owners")
            if unit.cached != (id(unit) in cached):
                raise IntegrityError(f"{unit} is marked cached against the index")
            referenced[unit.kind] += unit.refs > 0
        if owners:
            raise IntegrityError(f"{len(owners)} units are held but were given back")
        if referenced != self._referenced:
            raise IntegrityError(f"{self._referenced} referenced by count, {referenced} found")
        self._check_sum()

    def _check_sum(self) -> None:
        usage = self.usage()
        parts = ("pages_free", "pages_used", "pages_lent", "pages_cached", "pages_as_states")
        if sum(usage[part] for part in parts) != usage["pages_total"]:
            raise IntegrityError(f"the parts of the arena do not add up: {usage}")
        if self.book.fenced_pages() > usage["pages_free"]:
            raise IntegrityError("more pages are fenced than free")
