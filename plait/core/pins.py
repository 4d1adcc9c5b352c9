"""Cached units that actors outside the order of steps read; meanwhile they are neither evicted nor moved."""

from __future__ import annotations

from plait.core.arena import Unit
from plait.core.index import Node
from plait.core.store import Store


class Pins:
    """Keeps units of the store where they are while they are read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.memory = store.memory
        self.num_readers = 0

    def pin(self, node: Node, snapshot: bool) -> int:
        """Keep a page, or a snapshot and the page before it, where it is while an outside actor reads it.

        Returns:
            The step that must be over before it is read: it may be moving right now.
        """
        for unit in self._read_with(node, snapshot):
            self.memory.hold(unit)
            unit.readers += 1
        self.num_readers += 1
        return self.memory.moved

    def unpin(self, node: Node, snapshot: bool) -> None:
        """The actor has read it."""
        self.num_readers -= 1
        queue = self.store.queue
        for unit in self._read_with(node, snapshot):
            unit.readers -= 1
            if self.memory.drop(unit) and unit is node.snapshot:
                queue.add_snapshot(node)
        if not node.page.refs:
            queue.add_page(node)
        self.store.keep_to_budget()

    @staticmethod
    def _read_with(node: Node, snapshot: bool) -> list[Unit]:
        if not snapshot:
            return [node.page]
        assert node.snapshot is not None
        return [node.page, node.snapshot]
