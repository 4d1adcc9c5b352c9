"""How the arena is cut: pages, state units and the slabs that hold either.

::

    arena   | slab 0            | slab 1            | slab 2            | ...
    slab    | page | page | page| state      (pad)  | state      (pad)  |
              kind PAGE           kind STATE          ...

A slab is a whole number of pages. It holds pages, or state units (one, or several where a state is
smaller than a page), or nothing; an empty slab may change its kind. Both kinds are addressed by
``index * stride`` over the whole arena, so that an index alone finds the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes: strides are multiples of a cache line."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the arena, in bytes unless said.

    Args:
        page_size: tokens per page.
        page_bytes: bytes of a page; a multiple of ``ALIGNMENT``.
        state_bytes: bytes of one recurrent state; 0 for a model without recurrent layers.
        state_grid: tokens between positions at which a chunk may end and a state be exported.
        arena_bytes: bytes at hand; what does not make a whole slab is not used.
    """

    page_size: int
    page_bytes: int
    state_bytes: int
    state_grid: int
    arena_bytes: int

    def __post_init__(self) -> None:
        for name in ("page_size", "page_bytes", "state_grid"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be from 1 up")
        if self.page_bytes % ALIGNMENT:
            raise ValueError(f"page_bytes={self.page_bytes}: it must be a multiple of {ALIGNMENT}")
        if self.state_bytes < 0:
            raise ValueError(f"state_bytes={self.state_bytes}: it must not be negative")

    @property
    def has_state(self) -> bool:
        return self.state_bytes > 0

    @property
    def slab_pages(self) -> int:
        """Pages in a slab of kind PAGE."""
        return max(1, -(-self.state_bytes // self.page_bytes))

    @property
    def slab_bytes(self) -> int:
        return self.slab_pages * self.page_bytes

    @property
    def slab_states(self) -> int:
        """State units in a slab of kind STATE: the most that lie at one aligned stride."""
        if not self.has_state:
            return 0
        for count in range(self.slab_bytes // self.state_bytes, 1, -1):
            if self.slab_bytes % (count * ALIGNMENT) == 0:
                return count
        return 1

    @property
    def state_stride(self) -> int:
        """Bytes from one state unit to the next."""
        return self.slab_bytes // self.slab_states if self.has_state else 0

    @property
    def num_slabs(self) -> int:
        return self.arena_bytes // self.slab_bytes

    @property
    def num_pages(self) -> int:
        """Page indices run from 0 to here."""
        return self.num_slabs * self.slab_pages

    @property
    def num_states(self) -> int:
        """State indices run from 0 to here."""
        return self.num_slabs * self.slab_states

    @property
    def publish_grid(self) -> int:
        """Snapshots are shared at multiples of this many tokens."""
        return math.lcm(self.page_size, self.state_grid) if self.has_state else self.page_size

    @property
    def tokens_per_state(self) -> int:
        """Tokens of KV that cost as much memory as one state: the slot-to-KV ratio."""
        return -(-self.state_bytes * self.page_size // self.page_bytes)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return -(-tokens // self.page_size)

    def slabs_for(self, tokens: int) -> int:
        """Slabs that one request of ``tokens`` positions needs when it runs alone."""
        return -(-self.pages_for(tokens) // self.slab_pages) + (1 if self.has_state else 0)

    def longest_request(self) -> int:
        """Most tokens that one request running alone may hold."""
        slabs = self.num_slabs - (1 if self.has_state else 0)
        return max(0, slabs) * self.slab_pages * self.page_size
