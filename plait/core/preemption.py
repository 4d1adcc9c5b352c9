"""When memory runs out: who waits for memory that is coming, and who makes way."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.counters import SchedulerCounters
from plait.core.draft import Draft
from plait.core.queues import Queues
from plait.core.request import Request
from plait.core.swap import SwapSpace


class Preemption:
    """Makes room for running requests, at the cost of the least urgent, latest one."""

    def __init__(
        self, cache: Cache, queues: Queues, counters: SchedulerCounters, swap: SwapSpace | None
    ) -> None:
        self.cache = cache
        self.queues = queues
        self.counters = counters
        self.swap = swap

    def grow(self, draft: Draft, request: Request, end: int) -> bool:
        """Pages of a running request for positions below ``end``, preempting later ones for it.

        False: it takes no part in this step, since it waits for memory, or was itself the latest.
        """
        while not self.cache.holdings.grow(request, end):
            if self._memory_is_coming:
                draft.withdraw(request)
                return False
            victim = max((*self.queues.running[-1:], *self.queues.landed[-1:]), key=self.queues.order)
            draft.withdraw(victim)
            self.preempt(victim)
            draft.preempted = True
            if victim is request:
                return False
        return True

    @property
    def _memory_is_coming(self) -> bool:
        """Memory will return by itself: nobody needs to be preempted for it."""
        ending = any(request.num_behind == 0 for request in self.queues.running)
        return ending or bool(self.queues.leaving) or self.cache.memory_is_coming

    def preempt(self, request: Request) -> None:
        """Back to the queue. It keeps its answer so far and resumes from the swap or the last snapshot.

        A token that a step in flight samples for it is dropped, and sampled again when it resumes; a request
        that was swapped out keeps it. A prompt that came from another engine is not there any more: without
        swap it is computed here.
        """
        self.queues.remove(request)
        if self.swap is not None:
            self.swap.keep(request)
        self.cache.holdings.release(request)
        request.num_computed_tokens = request.num_committed_tokens = 0
        request.num_preemptions += 1
        if request.image is None:
            request.num_awaited = 0
            request.prompt_logprobs.clear()
            if not request.epoch:
                request.num_cached_tokens = None  # counted when it is admitted
        self.counters.preemptions += 1
        self.queues.wait(request)
