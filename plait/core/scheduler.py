"""One loop: ``schedule() -> StepPlan`` and ``update(StepPlan, StepResult)``.

There is no prefill phase and no decode phase. A request is behind its tokens, or level with them; each
step moves cursors within one budget of tokens, and memory is taken as they move.

``schedule`` may be called again before ``update``: the next step is planned on the cursors as they will
stand, with awaited tokens in the place of those that are not sampled yet. What a step in flight turns out to
have ended has then been launched once too often: its part of the later step is dropped.

The parts, in the order in which a request meets them::

    queues      who waits, runs, has landed or is leaving
    gate        who of those that wait runs from this step on; with ``starts``, ``leaders`` and ``room``
    received    prompts that another engine has computed
    stepping    what running requests get of a step; with ``chunks``, and ``preemption`` when memory runs out
    flight      steps that were launched
    prefilled   prompts that are computed for another engine
    endings     how requests end
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.core.arena import IntegrityError
from plait.core.cache import Cache
from plait.core.chunks import Chunks
from plait.core.counters import SchedulerCounters
from plait.core.draft import Draft, Planned
from plait.core.endings import Endings
from plait.core.flight import Flight
from plait.core.gate import Gate
from plait.core.handover import HandOver
from plait.core.leaders import Leaders
from plait.core.limits import Refused, SchedulerConfig, refuse_if_hopeless
from plait.core.pace import Pace, pairs
from plait.core.plan import ChunkResult, StepPlan, StepResult
from plait.core.preemption import Preemption
from plait.core.prefilled import Prefilled
from plait.core.progress import Progress, append_tokens
from plait.core.queues import Queues
from plait.core.received import Received
from plait.core.request import Request, Status
from plait.core.room import Room
from plait.core.starts import Starts
from plait.core.stepping import Stepping
from plait.core.swap import SwapSpace
from plait.core.tiers import Tiers


class Scheduler:
    """Plans steps over one cache."""

    def __init__(
        self,
        cache: Cache,
        config: SchedulerConfig,
        pace: Pace | None = None,
        tiers: Tiers | None = None,
        swap: SwapSpace | None = None,
        handover: HandOver | None = None,
    ) -> None:
        self.cache = cache
        self.tiers = tiers
        self.swap = swap
        self.handover = handover
        self.config = config
        self.pace = pace or Pace()
        self.grid = grid = cache.geometry.state_grid
        config.check(grid)
        self.counters = counters = SchedulerCounters()
        self.queues = queues = Queues(config.priorities)
        self.flight = Flight(cache, counters)
        self.endings = Endings(cache, queues, counters, swap, handover)
        room = Room(cache, queues, handover)
        self.prefilled: Prefilled | None = None
        self.received: Received | None = None
        if handover is not None:
            self.prefilled = Prefilled(cache, queues, room, counters, handover)
            self.received = Received(cache, queues, room, self.endings, handover, config.max_num_seqs)
        chunks = Chunks(config, grid, self.pace)
        self.preemption = Preemption(cache, queues, counters, swap)
        self.stepping = Stepping(queues, cache.holdings, chunks, self.preemption)
        leaders = Leaders(cache, self.flight)
        starts = Starts(cache, chunks, room, leaders, tiers, swap, self.prefilled)
        self.gate = Gate(queues, starts, chunks, self.received, counters, config.max_num_seqs)

    # -- coming and going -------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """All that have not ended, by id."""
        return self.queues.requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            Refused: it could never fit; the message has the arithmetic.
        """
        try:
            if request.id in self.requests:
                raise Refused(f"request id {request.id!r} is in use; choose another")
            refuse_if_hopeless(request, self.config, self.cache.geometry)
        except Refused:
            if request.source is not None and self.handover is not None:
                self.handover.refuse(request.source)
            raise
        if request.source is not None:
            assert self.handover is not None
            self.handover.expect(request)
        self.queues.arrive(request)

    def leave_at(self, num_prompt_tokens: int) -> int:
        """Where a prefiller stops: the last position at which a chunk may end and that leaves a token."""
        return (num_prompt_tokens - 1) // self.grid * self.grid

    def cancel(self, request_id: str) -> bool:
        """Forget a request, whatever it is doing. False if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return self.handover is not None and self.handover.withdraw(request_id)
        self.endings.finish(request, "abort")
        return True

    def fail(self, plan: StepPlan, request_ids: Iterable[str]) -> list[str]:
        """End requests for which the oldest step in flight found no token; call it before ``update``.

        Returns:
            Those that have ended by this; not those that were cancelled or preempted meanwhile.
        """
        parts, asked = self.flight.failing(plan), set(request_ids)
        staying = [
            part.request
            for part in parts
            if part.request.id in asked and (part.is_current or part.is_awaited)
        ]
        failed = [request for request in staying if request.status is not Status.LEAVING]
        for request in failed:
            self.endings.finish(request, "abort")
        return [request.id for request in failed]

    @property
    def has_work(self) -> bool:
        """Requests wait or run, or hand-overs need a step. Steps in flight may be left when it is False."""
        if not self.queues.are_empty:
            return True
        return self.handover is not None and self.handover.waits_for_steps and bool(self.cache.memory.copies)

    # -- planning ---------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        if self.received is not None:
            self.received.collect()
        if self.tiers is not None:
            self.tiers.collect()
        draft = Draft(self.cache.memory.launched + 1, self.config.max_num_batched_tokens)
        self.stepping.plan(draft)
        if not draft.preempted:
            self.gate.plan(draft)
        self.stepping.plan_left_out(draft)
        for part in draft.parts:
            part.exports = self.cache.publisher.exports(part.request, part.start, part.end)
        if self.tiers is not None:
            self.tiers.spill()
        if not draft.parts and not self.cache.memory.copies:
            return None
        return self.flight.launch(draft, self.queues.take_ended())

    def drain(self) -> tuple[list[Progress], dict[str, str]]:
        """Go on with hand-overs as far as steps that are over allow; after every ``schedule`` and ``update``.

        Returns:
            Progress of prompts that may be fetched elsewhere, and requests that failed, with the reason.
        """
        if self.received is None or self.prefilled is None:
            return [], {}
        failed = self.received.drain()
        return self.prefilled.drain(), failed

    # -- learning what a step gave ------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, seconds: float | None = None) -> list[Progress]:
        """Take in the result of the oldest step in flight.

        Args:
            seconds: how long the worker took, for ``Pace``.

        Returns:
            What happened to each request that got a token or ended.
        """
        parts = self.flight.land(plan, result)
        if seconds is not None:
            self.pace.observe(plan.num_tokens, sum(pairs(p.start, p.count) for p in parts), seconds)
        progress = []
        for part, chunk in zip(parts, result.results, strict=True):
            request = part.request
            if not self._take_in(part):
                continue
            request.prompt_logprobs += chunk.prompt_logprobs
            if part.end == request.leave_at and request.status is Status.RUNNING:
                assert self.prefilled is not None
                self.prefilled.lease(request)
            if part.sample:
                request.num_awaited -= 1
                progress.append(self._take_tokens(request, chunk))
        return progress

    def _take_in(self, part: Planned) -> bool:
        """Publish what a part has written, or drop it. Whether its request goes on with what it gave."""
        request = part.request
        if not part.is_current:
            self.cache.publisher.drop(part.exports)
            if not part.is_awaited:
                return False
            assert request.image is not None
            request.image.committed = part.end  # swapped out: what came of its last steps is not lost
            return True
        request.num_committed_tokens = part.end
        self.cache.publisher.commit(request, part.exports)
        if request.status is Status.LEAVING:
            self.endings.leave(request)
            return False
        return True

    def _take_tokens(self, request: Request, chunk: ChunkResult) -> Progress:
        progress = append_tokens(request, chunk)
        self.counters.generated_tokens += len(progress.tokens)
        if progress.finish_reason is not None:
            self.endings.finish(request, progress.finish_reason)
        return progress

    # -- checking ---------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants of scheduler and cache; recounts everything, for tests.

        Raises:
            IntegrityError: one is broken.
        """
        handover, queues = self.handover, self.queues
        queues.check([] if handover is None else [r.request for r in handover.receiving.values()])
        if len(queues.running) > self.config.max_num_seqs:
            raise IntegrityError(f"{len(queues.running)} requests run")
        holders = [*queues.requests.values(), *queues.leaving]
        if handover is not None:
            handover.check()
            holders += handover.holders()
        self.cache.check(holders, self.flight.pending_exports())
        if self.tiers is not None:
            self.tiers.check()
        if self.swap is not None:
            self.swap.check(list(queues.requests.values()))
