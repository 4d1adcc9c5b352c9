"""What steps have written becomes shared once they are over: full pages, and the snapshots they exported."""

from __future__ import annotations

from collections.abc import Iterable

from plait.core.arena import IntegrityError
from plait.core.plan import Kind
from plait.core.request import PendingExport, Request
from plait.core.reuse import Reuse
from plait.core.store import Store


class Publisher:
    """Finds room for snapshots that a step shall export; publishes, or drops, what came of it."""

    def __init__(self, store: Store, reuse: Reuse) -> None:
        self.store = store
        self.memory = store.memory
        self.geometry = store.geometry
        self.counters = store.counters
        self.reuse = reuse
        self.num_pending = 0
        """exports in flight"""

    def exports(self, request: Request, start: int, end: int) -> list[PendingExport]:
        """Room for the snapshots that a chunk from ``start`` to ``end`` should take.

        A snapshot that finds no memory is skipped: nothing is preempted for it.
        """
        if not self.reuse.takes_snapshots:
            return []
        pending = []
        for position, kind in self.reuse.policy.due(request.marks, start, self.reuse.limit(request, end)):
            if position <= request.num_tokens and self._has_snapshot(request, position):
                continue  # behind an awaited token nobody knows yet what is there
            state = self.store.take(Kind.STATE)
            if state is None:
                self.counters.exports_skipped += 1
                continue
            self.num_pending += 1
            self.counters.copied_bytes["snapshot"] += self.geometry.state_bytes
            pending.append(PendingExport(position, state, kind))
        return pending

    def _has_snapshot(self, request: Request, position: int) -> bool:
        depth = position // self.geometry.page_size
        if depth <= len(request.nodes):
            return request.nodes[depth - 1].snapshot is not None
        index = self.store.index
        index.extend_keys(request.page_keys, request.tokens, request.cache_salt, depth)
        node = index.nodes.get(request.page_keys[depth - 1])
        return node is not None and node.snapshot is not None

    def commit(self, request: Request, exports: Iterable[PendingExport]) -> None:
        """The step that moved ``num_committed_tokens`` is over: publish what it wrote."""
        if self.reuse.enabled:
            self._publish_pages(request)
        for export in exports:
            self._publish_snapshot(request, export)
        self.store.keep_to_budget()

    def _publish_pages(self, request: Request) -> None:
        index = self.store.index
        limit = self.reuse.limit(request, request.num_committed_tokens)
        pages = limit // self.geometry.page_size
        if pages <= len(request.nodes):
            return
        index.extend_keys(request.page_keys, request.tokens, request.cache_salt, pages)
        self.store.tick()
        for i in range(len(request.nodes), pages):
            parent = request.nodes[-1] if request.nodes else None
            key = request.page_keys[i]
            node = index.lookup(key, parent, request.tokens, i)
            if node is None:
                node = index.insert(key, parent, request.tokens, i, request.pages[i])
                if node is None:
                    return  # a hash collision: this prefix stays private
            elif node.page is not request.pages[i]:
                self.memory.hold(node.page)  # published twice: adopt the elder
                self.store.drop_page(request.pages[i], None)
                request.pages[i] = node.page
                request.table = ()
            self.store.stamp(node)
            request.nodes.append(node)
        if self.store.on_publish is not None and not self.geometry.has_state:
            self.store.on_publish(request.nodes[-1])

    def _publish_snapshot(self, request: Request, export: PendingExport) -> None:
        depth = export.position // self.geometry.page_size
        node = request.nodes[depth - 1] if depth <= len(request.nodes) else None
        self.num_pending -= 1
        if node is None or node.snapshot is not None:
            self.memory.release(export.state)
            return
        if node.depth * self.geometry.page_size != export.position:
            raise IntegrityError(f"a snapshot at {export.position} under a key of another length")
        self.store.attach(node, export.state, export.kind)

    def drop(self, exports: Iterable[PendingExport]) -> None:
        """The request of these exports is gone: their memory is free for the next step."""
        for export in exports:
            self.num_pending -= 1
            self.memory.release(export.state)
