"""A slower place for pages and snapshots, as the scheduler's half sees it: the worker's half implements it.

Units are filed under the key of their node, which says exactly what they hold; so nothing in a tier ever has
to be changed, and one that several engines share needs no locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from plait.core.plan import Kind
from plait.core.snapshots import SnapshotKind

Name = tuple[Kind, bytes]


@dataclass(frozen=True, slots=True)
class Item:
    """A page, or the snapshot at its end, as a tier knows it."""

    kind: Kind
    key: bytes
    """of the node"""
    parent: bytes
    """key of the node before it; empty at the start of a prompt"""
    depth: int
    """pages from the start of the prompt to the end of this one"""
    tokens: bytes
    """of this page, packed"""
    reason: SnapshotKind = SnapshotKind.SPACED
    """why the snapshot was taken; a tier gives it back"""

    @property
    def name(self) -> Name:
        return (self.kind, self.key)


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of one transfer."""

    ticket: int
    ok: bool
    reason: SnapshotKind = SnapshotKind.SPACED
    """of a snapshot that was read"""


class Tier(Protocol):
    """The worker's half: moves bytes between units of the arena and a slower place. Nothing here blocks."""

    @property
    def writable(self) -> bool:
        """False once the place is known to take no more."""
        ...

    def has(self, name: Name) -> bool:
        """Whether the unit was there when last looked; reading it may fail all the same."""
        ...

    def write(self, ticket: int, item: Item, index: int) -> None:
        """Begin to copy unit ``index`` of the arena to the tier."""
        ...

    def touch(self, units: list[tuple[Name, int]]) -> None:
        """These units, with their depths, are in use; a bounded tier gives up others first, and deep ones."""
        ...

    def read(self, ticket: int, item: Item, index: int) -> None:
        """Begin to fill unit ``index`` of the arena. Only what proves to be this very item counts as read."""
        ...

    def finished(self) -> list[Moved]:
        """Transfers that are over since the last call; their memory is quiet."""
        ...
