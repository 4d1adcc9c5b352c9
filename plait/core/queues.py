"""Who waits, who runs, whose prompt has landed: queues in order of arrival, or of priority and arrival."""

from __future__ import annotations

import bisect

from plait.core.arena import IntegrityError
from plait.core.request import Request, Status


class Queues:
    """All requests that have not ended, by id and in the queue of their status.

    Args:
        priorities: order by (priority, arrival) instead of arrival alone; a lower number goes first.
    """

    def __init__(self, priorities: bool) -> None:
        self.priorities = priorities
        self.requests: dict[str, Request] = {}
        """by id: those in the queues, and those whose prompt is being received"""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.landed: list[Request] = []
        """requests whose prompt came from another engine; they hold memory and go before all that wait"""
        self.leaving: list[Request] = []
        """ended requests that a step in flight still computes for"""
        self._arrivals = 0
        self._ended: list[str] = []

    def order(self, request: Request) -> tuple[int, int]:
        """The lower goes first."""
        return (request.priority if self.priorities else 0, request.arrival)

    # -- coming and going -------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A new request; it waits."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self.requests[request.id] = request
        bisect.insort(self.waiting, request, key=self.order)

    def wait(self, request: Request) -> None:
        """One that stands in no queue waits (again)."""
        request.status = Status.WAITING
        bisect.insort(self.waiting, request, key=self.order)

    def land(self, request: Request) -> None:
        """One whose prompt was received has it."""
        bisect.insort(self.landed, request, key=self.order)

    def run(self, request: Request) -> None:
        """One that waits, or has landed, runs."""
        self.remove(request)
        request.status = Status.RUNNING
        bisect.insort(self.running, request, key=self.order)

    def remove(self, request: Request) -> None:
        """Out of its queue, if its status has one. If it ran, the worker will be told to forget it."""
        match request.status:
            case Status.WAITING:
                self.waiting.remove(request)
            case Status.LANDED:
                self.landed.remove(request)
            case Status.RUNNING:
                self.running.remove(request)
                self._ended.append(request.id)

    def forget(self, request: Request) -> None:
        """It has ended; it stands in no queue."""
        del self.requests[request.id]

    def leave(self, request: Request) -> None:
        """An ended one stays until its last step is over."""
        request.status = Status.LEAVING
        self.leaving.append(request)

    def take_ended(self) -> tuple[str, ...]:
        """Those that ran and do not any more, since the last call."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    # -- looking ----------------------------------------------------------------------------

    @property
    def are_empty(self) -> bool:
        """Nobody waits, runs or has landed."""
        return not (self.waiting or self.running or self.landed)

    def check(self, received: list[Request]) -> None:
        """``received``: requests whose prompt is on its way.

        Raises:
            IntegrityError: somebody stands in the wrong queue, out of order, in two, or in none.
        """
        queues = (
            (self.running, Status.RUNNING), (self.landed, Status.LANDED), (self.waiting, Status.WAITING),
        )  # fmt: skip
        for queue, status in queues:
            if any(request.status is not status for request in queue):
                raise IntegrityError(f"a request that is not {status.value} stands in that queue")
            if queue != sorted(queue, key=self.order):
                raise IntegrityError(f"the queue of {status.value} requests is out of order")
        if {r.id for r in (*self.running, *self.landed, *self.waiting, *received)} != set(self.requests):
            raise IntegrityError("a request stands in no queue, or in two")
        if any(request.status is not Status.LEAVING or not request.in_flight for request in self.leaving):
            raise IntegrityError("a request leaves for which no step computes")
