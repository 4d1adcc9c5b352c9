"""How requests end, whatever they were doing: their memory returns, or is kept for others."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.counters import SchedulerCounters
from plait.core.handover import HandOver
from plait.core.queues import Queues
from plait.core.request import Request, Status
from plait.core.swap import SwapSpace


class Endings:
    """Takes ended requests out of queue, swap buffer, hand-over and arena."""

    def __init__(
        self,
        cache: Cache,
        queues: Queues,
        counters: SchedulerCounters,
        swap: SwapSpace | None,
        handover: HandOver | None,
    ) -> None:
        self.cache = cache
        self.queues = queues
        self.counters = counters
        self.swap = swap
        self.handover = handover

    def finish(self, request: Request, reason: str) -> None:
        """The request has ended; with "abort" nothing of it is kept beyond what was published."""
        if request.status is Status.RECEIVING:
            assert self.handover is not None
            self.handover.drop(request)
        self.queues.remove(request)
        if request.source is not None:
            assert self.handover is not None
            self.handover.forgo(request)
        if self.swap is not None:
            self.swap.drop(request)
        request.status = Status.FINISHED
        if reason == "abort":
            self.cache.holdings.release(request)
        elif self.cache.leaves.must_wait(request):
            self.queues.leave(request)
        else:
            self.cache.leaves.retire(request)
        self.queues.forget(request)
        self.counters.count_end(reason)

    def leave(self, request: Request) -> None:
        """The last step that computed for an ended request is over."""
        self.queues.leaving.remove(request)
        request.status = Status.FINISHED
        self.cache.leaves.retire(request)
