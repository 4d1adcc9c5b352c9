"""The book of the arena: which unit is whose. No bytes here, only indices.

A unit (page or state) is handed out as a ``Unit``, an object that its owners share. Owners keep the
object, never the index: when units move to empty a slab, the index changes in the one object and no
table has to be patched. Indices are read when a plan is built.

Bytes are in one of these states at any time::

    free        in no one's hands; the worker may use it in its next step
    fenced      free, but a step in flight may still touch it: not yet for an outside actor
    cached      held by the prefix index alone
    referenced  held by at least one request (perhaps by the index too), or an export in flight
    lent        in the hands of an outside actor that writes it (a transfer, a restore from a tier)

A cached unit that an outside actor reads (a spill) is pinned: referenced on its behalf, and not moved.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.core.geometry import Geometry
from plait.core.plan import Copy, Kind


class IntegrityError(AssertionError):
    """A rule of the cache or the scheduler is broken: a bug in plait."""


class Unit:
    """A page or a state unit in somebody's hands."""

    __slots__ = ("cached", "copied", "index", "kind", "lent", "pins", "readers", "refs")

    def __init__(self, kind: Kind, index: int) -> None:
        self.kind = kind
        self.index = index
        self.refs = 0
        """requests (or exports in flight) that hold it"""
        self.cached = False
        """the prefix index holds it"""
        self.lent = False
        """an outside actor holds it; it must not move"""
        self.pins = 0
        """outside actors that read or write it for its owners; while there are any it must not move"""
        self.copied = 0
        """the last step that fills it by a copy; its content is not there before that is over"""
        self.readers = 0
        """outside actors that read it; each is one of ``refs``, and meanwhile it must not move"""

    def __repr__(self) -> str:
        return f"{self.kind.name.lower()} {self.index} (refs {self.refs}, cached {self.cached})"


class ArenaBook:
    """Hands out and takes back units; knows slabs, kinds, fences.

    Allocation comes from the fullest slab that has room, so that slabs empty out and can change
    their kind; ``near`` keeps a request's pages together.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        count = geometry.num_slabs
        self.per_slab = (geometry.slab_pages, geometry.slab_states)
        self.kind_of: list[Kind | None] = [None] * count
        self.empty: list[int] = list(range(count - 1, -1, -1))
        # free_in[s]: free indices of slab s, under its present kind. used_in[s]: units handed out.
        self.free_in: list[list[int]] = [[] for _ in range(count)]
        self.used_in: list[int] = [0] * count
        # roomy[kind][n]: slabs of this kind with n units handed out and room for more.
        self.roomy: tuple[list[dict[int, None]], ...] = tuple(
            [{} for _ in range(max(n, 1))] for n in self.per_slab
        )
        self.units: tuple[dict[int, Unit], ...] = ({}, {})
        """units handed out, by kind and index"""
        self.free_count = [0, 0]
        """free units in slabs of each kind (empty slabs not counted)"""
        self.slabs_of = [0, 0]
        # fence_of[p]: last step that may touch page p's bytes on behalf of an owner who gave them back.
        self.fence_of: list[int] = [0] * geometry.num_pages
        self.completed = 0
        """last step known to be over"""
        self.num_lent = 0

    # -- taking -----------------------------------------------------------------------------

    def take(self, kind: Kind, near: Unit | None = None) -> Unit | None:
        """A free unit, or None. Its bytes are whatever was there before."""
        slab = self._slab_with_room(kind, near)
        if slab is None:
            return None
        return self._take_from(slab, kind)

    def _slab_with_room(self, kind: Kind, near: Unit | None, apart_from: int = -1) -> int | None:
        if near is not None:
            slab = near.index // self.per_slab[kind]
            if self.free_in[slab]:
                return slab
        if self.free_count[kind]:
            for bucket in reversed(self.roomy[kind]):
                for slab in bucket:
                    if slab != apart_from:
                        return slab
        if self.empty and apart_from < 0:
            return self._open(kind)
        return None

    def _open(self, kind: Kind) -> int:
        """Give an empty slab a kind."""
        slab = self.empty.pop()
        self.kind_of[slab] = kind
        size = self.per_slab[kind]
        self.free_in[slab] = list(range((slab + 1) * size - 1, slab * size - 1, -1))
        self.free_count[kind] += size
        self.slabs_of[kind] += 1
        self.roomy[kind][0][slab] = None
        return slab

    def _take_from(self, slab: int, kind: Kind) -> Unit:
        unit = Unit(kind, self._take_index(slab, kind))
        self.units[kind][unit.index] = unit
        return unit

    def _take_index(self, slab: int, kind: Kind) -> int:
        index = self.free_in[slab].pop()
        used = self.used_in[slab]
        del self.roomy[kind][used][slab]
        self.used_in[slab] = used + 1
        if self.free_in[slab]:
            self.roomy[kind][used + 1][slab] = None
        self.free_count[kind] -= 1
        return index

    # -- giving back ------------------------------------------------------------------------

    def give(self, unit: Unit, fence: int) -> None:
        """Take a unit back. ``fence`` is the last launched step that may still touch it."""
        if self.units[unit.kind].get(unit.index) is not unit:
            raise IntegrityError(f"{unit} is given back but was not handed out (a double free)")
        if unit.refs or unit.cached or unit.lent or unit.pins:
            raise IntegrityError(f"{unit} is given back while it is held")
        del self.units[unit.kind][unit.index]
        self._give_index(unit.kind, unit.index, fence)

    def _give_index(self, kind: Kind, index: int, fence: int) -> None:
        slab = index // self.per_slab[kind]
        for page in self._pages_under(kind, index):
            self.fence_of[page] = max(self.fence_of[page], fence)
        used = self.used_in[slab]
        if self.free_in[slab]:
            del self.roomy[kind][used][slab]
        self.used_in[slab] = used - 1
        self.free_in[slab].append(index)
        self.free_count[kind] += 1
        if used == 1:
            self._close(slab, kind)
        else:
            self.roomy[kind][used - 1][slab] = None

    def _close(self, slab: int, kind: Kind) -> None:
        """A slab has emptied: it may serve either kind again."""
        self.free_count[kind] -= self.per_slab[kind]
        self.slabs_of[kind] -= 1
        self.kind_of[slab] = None
        self.free_in[slab] = []
        self.empty.append(slab)

    def _pages_under(self, kind: Kind, index: int) -> range:
        """The page-sized ranges of bytes that a unit touches."""
        if kind is Kind.PAGE:
            return range(index, index + 1)
        slab = index // self.per_slab[kind]
        return range(slab * self.geometry.slab_pages, (slab + 1) * self.geometry.slab_pages)

    # -- moving -----------------------------------------------------------------------------

    def vacate(self, kind: Kind, fence: int) -> list[Copy] | None:
        """Empty one slab of ``kind`` by moving its units into holes of other slabs.

        Takes the slab with the fewest units in use. Returns the copies to make, in order, or None when
        no slab can be emptied so.
        """
        for bucket in self.roomy[kind]:
            for slab in bucket:
                holes = self.free_count[kind] - len(self.free_in[slab])
                if holes < self.used_in[slab]:
                    return None  # a fuller slab needs more holes still
                size = self.per_slab[kind]
                held = [self.units[kind].get(i) for i in range(slab * size, (slab + 1) * size)]
                residents = [unit for unit in held if unit is not None]
                if any(unit.lent or unit.pins or unit.readers for unit in residents):
                    continue
                return [self._move(unit, slab, fence) for unit in residents]
        return None

    def _move(self, unit: Unit, out_of: int, fence: int) -> Copy:
        slab = self._slab_with_room(unit.kind, None, apart_from=out_of)
        assert slab is not None
        source = unit.index
        unit.index = self._take_index(slab, unit.kind)
        unit.copied = fence  # the step that carries the copy is the last to touch the source
        del self.units[unit.kind][source]
        self.units[unit.kind][unit.index] = unit
        self._give_index(unit.kind, source, fence)
        return Copy(unit.kind, source, unit.index)

    # -- outside actors ---------------------------------------------------------------------

    def complete(self, step: int) -> None:
        """All steps up to ``step`` are over."""
        self.completed = max(self.completed, step)

    def lend(self, kind: Kind) -> Unit | None:
        """A free unit for an actor outside the order of steps: none that a step in flight may touch."""
        for slab, index in self._unfenced(kind):
            self.free_in[slab].remove(index)
            self.free_in[slab].append(index)  # the next one taken
            unit = self._take_from(slab, kind)
            self.begin_loan(unit)
            return unit
        return None

    def begin_loan(self, unit: Unit) -> None:
        """The unit, held by nobody, goes to an outside actor."""
        unit.lent = True
        self.num_lent += 1

    def _unfenced(self, kind: Kind) -> Iterator[tuple[int, int]]:
        for bucket in reversed(self.roomy[kind]):
            for slab in bucket:
                for index in self.free_in[slab]:
                    if self._is_over(kind, index):
                        yield slab, index
        size = self.geometry.slab_pages
        for slab in list(self.empty):
            if all(self.fence_of[p] <= self.completed for p in range(slab * size, (slab + 1) * size)):
                self.empty.remove(slab)
                self.empty.append(slab)
                self._open(kind)
                yield slab, self.free_in[slab][-1]

    def quiet_after(self, unit: Unit) -> int:
        """The last step that may touch the unit's bytes for an earlier owner, or by a copy into it."""
        return max(unit.copied, *(self.fence_of[page] for page in self._pages_under(unit.kind, unit.index)))

    def _is_over(self, kind: Kind, index: int) -> bool:
        return all(self.fence_of[page] <= self.completed for page in self._pages_under(kind, index))

    def end_loan(self, unit: Unit) -> None:
        """The outside actor is done with the unit (its memory is known to be quiet)."""
        if not unit.lent:
            raise IntegrityError(f"{unit} comes back from a loan it was not on")
        unit.lent = False
        self.num_lent -= 1

    # -- counting ---------------------------------------------------------------------------

    def fenced_pages(self) -> int:
        """Free pages (empty slabs included) that a step in flight may still touch."""
        pages = self.geometry.slab_pages
        count = 0
        for slab in range(self.geometry.num_slabs):
            kind = self.kind_of[slab]
            if kind is None:
                free = range(slab * pages, (slab + 1) * pages)
            elif kind is Kind.PAGE:
                free = self.free_in[slab]  # type: ignore[assignment]
            else:
                continue
            count += sum(self.fence_of[page] > self.completed for page in free)
        return count

    def free_pages(self) -> int:
        """Pages that can be had without evicting anything."""
        return self.free_count[Kind.PAGE] + len(self.empty) * self.geometry.slab_pages

    def check(self) -> None:
        """Recount everything.

        Raises:
            IntegrityError: the books do not agree with themselves.
        """
        slabs_of, free_count = [0, 0], [0, 0]
        seen: tuple[set[int], set[int]] = (set(), set())
        for slab, kind in enumerate(self.kind_of):
            if kind is None:
                if self.used_in[slab] or self.free_in[slab] or slab not in self.empty:
                    raise IntegrityError(f"slab {slab} has no kind but is not empty")
                continue
            size = self.per_slab[kind]
            free = set(self.free_in[slab])
            held = {i for i in range(slab * size, (slab + 1) * size) if i in self.units[kind]}
            if len(free) != len(self.free_in[slab]) or free & held or len(free) + len(held) != size:
                raise IntegrityError(f"slab {slab}: free {sorted(free)} and held {sorted(held)} of {size}")
            if not held or self.used_in[slab] != len(held):
                raise IntegrityError(f"slab {slab} says {self.used_in[slab]} in use, holds {len(held)}")
            if (slab in self.roomy[kind][min(len(held), size - 1)]) != bool(free):
                raise IntegrityError(f"slab {slab} stands in the wrong bucket")
            slabs_of[kind] += 1
            free_count[kind] += len(free)
            seen[kind].update(held)
        if slabs_of != self.slabs_of or free_count != self.free_count:
            raise IntegrityError(f"counts {self.slabs_of} {self.free_count}, found {slabs_of} {free_count}")
        for kind in Kind:
            if seen[kind] != set(self.units[kind]):
                raise IntegrityError(f"{kind.name}: units outside the slabs of their kind")
            for index, unit in self.units[kind].items():
                if unit.index != index or unit.kind is not kind:
                    raise IntegrityError(f"{unit} is filed under {kind.name} {index}")
                if not (unit.refs or unit.cached or unit.lent):
                    raise IntegrityError(f"{unit} is held by nobody (a leak)")
                if unit.refs < 0 or unit.pins < 0:
                    raise IntegrityError(f"{unit} has negative references, or pins")
        lent = sum(unit.lent for kind in Kind for unit in self.units[kind].values())
        if lent != self.num_lent:
            raise IntegrityError(f"{self.num_lent} units lent by count, {lent} found")
