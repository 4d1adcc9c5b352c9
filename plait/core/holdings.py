"""What a request holds of the arena: pages as far as its cursor, and a slot. How that grows and returns."""

from __future__ import annotations

from plait.core.arena import IntegrityError
from plait.core.plan import Kind
from plait.core.request import Request, Status
from plait.core.store import Store


class Holdings:
    """Grows and returns what requests hold; the store makes room, and keeps what was published."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.memory = store.memory
        self.geometry = store.geometry

    def grow(self, request: Request, end: int) -> bool:
        """Pages for positions below ``end``. What could be had is kept even when the answer is False."""
        while len(request.pages) * self.geometry.page_size < end:
            page = self.store.take(Kind.PAGE, near=request.pages[-1] if request.pages else None)
            if page is None:
                return False
            request.pages.append(page)
        return True

    def page_table(self, request: Request, end: int) -> tuple[int, ...]:
        """Indices of the pages that hold positions below ``end``. To be read when a plan is frozen."""
        count, moves = self.geometry.pages_for(end), self.memory.counters.units_moved
        if len(request.table) != count or request.table_moves != moves:
            request.table = tuple([page.index for page in request.pages[:count]])
            request.table_moves = moves
        return request.table

    def release(self, request: Request) -> None:
        """The request leaves the arena (finished, cancelled or preempted)."""
        for i in range(len(request.pages) - 1, -1, -1):
            node = request.nodes[i] if i < len(request.nodes) else None
            self.store.drop_page(request.pages[i], node)
        if request.slot is not None:
            self.memory.release(request.slot)
        request.pages, request.nodes, request.slot, request.table = [], [], None, ()
        self.store.keep_to_budget()

    def check(self, request: Request) -> None:
        """Raises IntegrityError: the request holds more or less than its cursor and status allow."""
        if not 0 <= request.num_committed_tokens <= request.num_computed_tokens <= request.length:
            raise IntegrityError(f"request {request.id}: the cursor is out of range")
        if request.num_committed_tokens > request.num_tokens:
            raise IntegrityError(f"request {request.id}: tokens are committed that nobody knows")
        if request.status in (Status.WAITING, Status.FINISHED):
            if request.pages or request.slot is not None or request.nodes:
                raise IntegrityError(f"request {request.id} holds memory without running")
            return
        if len(request.pages) * self.geometry.page_size < request.num_computed_tokens:
            raise IntegrityError(f"request {request.id}: pages end before its cursor")
        if (request.slot is not None) != self.geometry.has_state:
            raise IntegrityError(f"request {request.id}: a slot too many or too few")
        for node, page in zip(request.nodes, request.pages, strict=False):
            if node.page is not page:
                raise IntegrityError(f"request {request.id} holds another page than its node")
