"""A tier in symbolic memory: transfers run late, in any order, part by part, and may fail or be forgotten.

What it reads from the arena is compared with what the item's key says, at the moment it is read: a real tier
could not tell, since its checksum would be right for whatever it read.
"""

from __future__ import annotations

from array import array

from symbolic import Corruption, digests
from symbolic_world import World

from plait.core.plan import Kind
from plait.core.snapshots import SnapshotKind
from plait.core.tier import Item, Moved, Name


class SymbolicTier:
    """``contents`` may be handed to another world of the same geometry: a restart."""

    def __init__(self, world: World, contents: dict | None = None) -> None:
        self.worker = world.worker
        self.index = world.cache.index
        self.rng = world.rng
        self.contents: dict[Name, tuple[list[int], SnapshotKind]] = {} if contents is None else contents
        self.writes: list[tuple[int, Item, int, list[int]]] = []
        self.reads: list[tuple[int, Item, int]] = []
        self.over: list[Moved] = []
        self.last: dict[bytes, int] = {b"": 0}
        """digest at the end of each page, by its key"""
        for (kind, key), (content, _) in self.contents.items():
            if kind is Kind.PAGE:
                self.last[key] = content[-1]
        self.read_back = 0

    # -- as the scheduler sees it -----------------------------------------------------------

    @property
    def writable(self) -> bool:
        return True

    def has(self, name: Name) -> bool:
        return name in self.contents

    def write(self, ticket: int, item: Item, index: int) -> None:
        self.writes.append((ticket, item, index, self.expected(item)))

    def touch(self, units: list[tuple[Name, int]]) -> None:
        for name, _ in units:
            assert name in self.contents

    def read(self, ticket: int, item: Item, index: int) -> None:
        self.reads.append((ticket, item, index))

    def finished(self) -> list[Moved]:
        over, self.over = self.over, []
        return over

    # -- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """One transfer, or none, runs now; and now and then something is forgotten."""
        work = self.writes + self.reads
        if work and self.rng.random() < 0.5:
            self.run(self.rng.choice(work))
        if self.contents and self.rng.random() < 0.01:
            del self.contents[self.rng.choice(list(self.contents))]

    def run(self, transfer: tuple) -> None:
        if transfer in self.writes:
            self.writes.remove(transfer)
            self.over.append(self.take(*transfer))
        else:
            self.reads.remove(transfer)
            self.over.append(self.give(*transfer))

    def expected(self, item: Item) -> list[int]:
        """Digests of the item's page, from its tokens and those of the pages before it."""
        trail = digests([0, *array("I", item.tokens)], [self.last_of(item.parent)])[1:]
        self.last[item.key] = trail[-1]
        return trail

    def last_of(self, key: bytes) -> int:
        if key not in self.last:
            node = self.index.nodes[key]
            before = self.last_of(node.parent.key if node.parent else b"")
            self.last[key] = digests([0, *array("I", node.tokens)], [before])[-1]
        return self.last[key]

    def take(self, ticket: int, item: Item, index: int, want: list[int]) -> Moved:
        if item.kind is Kind.PAGE:
            if self.worker.read_page(index) != want:
                raise Corruption(f"a page was written to the tier (unit {index}) that holds something else")
        elif self.worker.states.get(index) != want[-1]:
            raise Corruption(f"a state was written to the tier (unit {index}) that is another one")
        if self.rng.random() < 0.05:
            return Moved(ticket, False)
        self.contents[item.name] = (want, item.reason)
        return Moved(ticket, True)

    def give(self, ticket: int, item: Item, index: int) -> Moved:
        if self.rng.random() < 0.05:
            self.contents.pop(item.name, None)  # damaged: what was read is rubbish
            self.fill(item.kind, index, [-1] * self.worker.geometry.page_size)
        if item.name not in self.contents:
            return Moved(ticket, False)
        content, reason = self.contents[item.name]
        self.fill(item.kind, index, content)
        self.read_back += 1
        return Moved(ticket, True, reason)

    def fill(self, kind: Kind, index: int, content: list[int]) -> None:
        if kind is Kind.PAGE:
            self.worker.write_page(index, list(content))
        else:
            self.worker.write_state(index, content[-1])
