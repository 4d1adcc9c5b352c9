"""Which bytes of a peer's arena belong where in the own one.

Pages and states are head-major (``plait.kernels.layout``): a unit is a row of equal *parts*, one per
key-value head (of a page) or key-head group (of a state). A rank of a tensor-parallel engine holds some of
the parts, in order, so what two ranks have in common is one contiguous span of each unit, whatever their
degrees::

    one engine of degree 2, rank 1:   page |  head 2  |  head 3  |
    read by degree 4, rank 2:         page |  head 2  |

A whole page, or a whole state, is one span where the degrees are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.geometry import Geometry
from plait.kernels.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes, from ``remote`` on in the peer's arena and from ``local`` on in the own one."""

    remote: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class UnitMap:
    """Where one rank keeps the parts of its units of one kind. Sizes are in bytes unless said.

    Args:
        stride: from one unit to the next.
        part_bytes: of one head or group, all layers.
        first: number of its first part within the model's.
        parts: how many it holds.
        total: how many the model has.
    """

    stride: int
    part_bytes: int
    first: int
    parts: int
    total: int

    def offset(self, unit: int, part: int) -> int:
        """Of a part of the model in the arena."""
        return unit * self.stride + (part - self.first) * self.part_bytes


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """What a peer must know of an arena's layout."""

    page_size: int
    """tokens"""
    pages: UnitMap
    states: UnitMap | None
    arena_bytes: int

    @classmethod
    def of(cls, layout: CacheLayout, geometry: Geometry) -> ArenaMap:
        """Of an engine that holds all heads."""
        page, state = layout.page, layout.state
        states = None
        if state is not None:
            groups = state.num_groups
            states = UnitMap(geometry.state_stride, state.group_bytes, 0, groups, groups)
        heads = page.num_kv_heads
        pages = UnitMap(page.page_bytes, page.head_bytes, 0, heads, heads)
        return cls(page.page_size, pages, states, geometry.num_slabs * geometry.slab_bytes)

    def differs_from(self, other: ArenaMap) -> str | None:
        """Why memory cannot be exchanged with a peer of this map; None: it can."""
        if self.page_size != other.page_size:
            return f"pages of {other.page_size} tokens there, of {self.page_size} here; set block_size alike"
        if (self.states is None) != (other.states is None):
            return "one of the models has recurrent layers, the other has none"
        kinds = [("page", self.pages, other.pages)]
        if self.states is not None and other.states is not None:
            kinds.append(("state", self.states, other.states))
        for name, ours, theirs in kinds:
            if (ours.part_bytes, ours.total) != (theirs.part_bytes, theirs.total):
                return (
                    f"a {name} of {theirs.total} heads of {theirs.part_bytes} bytes there, "
                    f"of {ours.total} of {ours.part_bytes} here: another model, or another cache dtype"
                )
        return None


def parts_of(rank: int, degree: int, total: int) -> range:
    """Parts that a rank of a tensor-parallel engine holds: an even share, or one, of which there are copies,
    where there are fewer parts than ranks.

    Raises:
        ValueError: the parts cannot be shared out evenly.
    """
    if total % degree and degree % total:
        raise ValueError(f"{total} heads cannot be shared out among {degree} ranks")
    if degree >= total:
        first = rank * total // degree
        return range(first, first + 1)
    share = total // degree
    return range(rank * share, (rank + 1) * share)


def readers(ours: UnitMap, theirs: Sequence[UnitMap]) -> list[tuple[int, range]]:
    """From which of the peer's ranks to read which parts: (rank, parts). Each of our parts is read once.

    Raises:
        ValueError: they do not hold all of them.
    """
    plan, part = [], ours.first
    while part < ours.first + ours.parts:
        rank = next((r for r, m in enumerate(theirs) if m.first <= part < m.first + m.parts), None)
        if rank is None:
            raise ValueError(f"none of the {len(theirs)} ranks of the peer holds head {part}")
        end = min(theirs[rank].first + theirs[rank].parts, ours.first + ours.parts)
        plan.append((rank, range(part, end)))
        part = end
    return plan


def span(ours: UnitMap, theirs: UnitMap, parts: range, local: int, remote: int) -> Span:
    """The bytes of ``parts`` of the peer's unit ``remote`` that go into the own unit ``local``."""
    return Span(
        remote=theirs.offset(remote, parts.start),
        local=ours.offset(local, parts.start),
        length=len(parts) * ours.part_bytes,
    )
