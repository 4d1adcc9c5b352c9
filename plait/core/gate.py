"""Who of those that wait runs from this step on."""

from __future__ import annotations

from plait.core.chunks import Chunks
from plait.core.counters import SchedulerCounters
from plait.core.draft import Draft
from plait.core.queues import Queues
from plait.core.received import Received
from plait.core.request import Request, Status
from plait.core.starts import Starts

MOST_FOLLOWERS = 64
"""Most waiting requests that are passed over in a step since they follow a leader."""


class Gate:
    """Admits landed and waiting requests in order while budget, ``max_num_seqs`` and memory allow."""

    def __init__(
        self,
        queues: Queues,
        starts: Starts,
        chunks: Chunks,
        received: Received | None,
        counters: SchedulerCounters,
        max_num_seqs: int,
    ) -> None:
        self.queues = queues
        self.starts = starts
        self.chunks = chunks
        self.received = received
        self.counters = counters
        self.max_num_seqs = max_num_seqs

    def plan(self, draft: Draft) -> None:
        """Landed requests first.

        One that follows a leader, or waits for a tier, is passed over; one that waits for memory holds up all
        behind it. One whose prompt lies elsewhere needs no more than memory to begin, and then stands in
        nobody's way.
        """
        self._plan_landed(draft)
        waiting = self.queues.waiting
        at = followers = 0
        while at < len(waiting) and followers < MOST_FOLLOWERS:
            request = waiting[at]
            if request.source is not None:
                assert self.received is not None
                if self.received.is_full:
                    at += 1
                elif not self.received.receive(request):
                    return
                continue
            if self._is_full or draft.left < 1:
                return
            count = self.starts.start(draft, request)
            if count is None:
                if request.status is not Status.WAITING:
                    continue  # nothing of it is to be computed here
                at += 1
                followers += 1
                continue
            if not count:
                return
            self._run(draft, request, count)

    @property
    def _is_full(self) -> bool:
        return len(self.queues.running) >= self.max_num_seqs

    def _plan_landed(self, draft: Draft) -> None:
        """Prompts that came from elsewhere go on here, in order."""
        while self.queues.landed and not self._is_full:
            request = self.queues.landed[0]
            count = self.chunks.count(draft, request, request.num_computed_tokens)
            if count < 1:
                return
            self._run(draft, request, count)

    def _run(self, draft: Draft, request: Request, count: int) -> None:
        """The request runs, from this step on."""
        self.queues.run(request)
        request.epoch += 1
        self.counters.count_admission(request)
        draft.admitted.append(request)
        draft.add(request, count)
