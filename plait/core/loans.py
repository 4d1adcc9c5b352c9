"""Memory in the hands of actors outside the order of steps, which write it: a transfer, a tier."""

from __future__ import annotations

from collections.abc import Iterable

from plait.core.arena import Unit
from plait.core.index import Node
from plait.core.plan import Kind
from plait.core.snapshots import SnapshotKind
from plait.core.store import Store


class Loans:
    """Lends memory of the store's arena; what comes back filled is kept there."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.memory = store.memory
        self.num_quarantined = 0
        """units that are written to though nobody waits for it"""

    @property
    def are_coming(self) -> bool:
        """Something lent will return. What is quarantined will too, but nobody can say when."""
        return self.memory.num_lent > self.num_quarantined

    def lend(self, kind: Kind) -> Unit | None:
        """Memory that no step in flight may touch. None: there is none."""
        return self.memory.lend(kind)

    def borrow(self, kind: Kind, near: Unit | None = None) -> tuple[Unit, int] | None:
        """As ``lend``, but room is made for it.

        Returns:
            The unit, and the step that must be over before the actor touches it. None without memory.
        """
        unit = self.store.take(kind, near)
        if unit is None:
            return None
        self.memory.begin_loan(unit)
        return unit, self.memory.quiet_after(unit)

    def end(self, unit: Unit) -> None:
        """The actor is done and the memory is known to be quiet."""
        self.memory.end_loan(unit)
        self.memory.give(unit)

    # -- filled -----------------------------------------------------------------------------

    def fill_page(self, parent: Node | None, key: bytes, packed: bytes, unit: Unit) -> Node | None:
        """A lent page that now holds what ``key`` says becomes cached; this ends the loan.

        Returns:
            The node of these tokens: a new one, or one that was published meanwhile. None: the key stands for
            other tokens.
        """
        index = self.store.index
        node = index.find(key, parent, packed)
        if node is not None or (node := index.add(key, parent, packed, unit)) is None:
            self.end(unit)
            return node
        self.memory.end_loan(unit)
        self.store.stamp(node)
        return node

    def fill_snapshot(self, node: Node, unit: Unit, kind: SnapshotKind) -> None:
        """A lent state that now holds what the node's key says becomes its snapshot; this ends the loan."""
        if node.snapshot is not None:
            self.end(unit)
            return
        self.memory.end_loan(unit)
        self.store.set_snapshot(node, unit, kind)

    # -- quarantine -------------------------------------------------------------------------

    def quarantine(self, units: Iterable[Unit]) -> None:
        """Set received units aside that may be written to though nobody waits for it any more."""
        for unit in units:
            unit.pins = 0
            self.memory.begin_loan(unit)
            self.num_quarantined += 1

    def end_quarantine(self, units: Iterable[Unit]) -> None:
        """The outside actor is known to be done with them."""
        for unit in units:
            self.num_quarantined -= 1
            self.end(unit)
