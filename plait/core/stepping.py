"""The part of a step that running requests get: answers a token each, prompts what the budget leaves."""

from __future__ import annotations

import bisect

from plait.core.chunks import Chunks
from plait.core.draft import Draft
from plait.core.holdings import Holdings
from plait.core.preemption import Preemption
from plait.core.queues import Queues
from plait.core.request import Request, Status


class Stepping:
    """Plans running requests; level ones take turns where they do not all fit."""

    def __init__(self, queues: Queues, holdings: Holdings, chunks: Chunks, preemption: Preemption) -> None:
        self.queues = queues
        self.holdings = holdings
        self.chunks = chunks
        self.preemption = preemption
        self._last_turn = (0, 0)

    def plan(self, draft: Draft) -> None:
        """Running requests in order, each by what it is behind."""
        level = [request for request in self.queues.running if request.is_level]
        draft.promise(self._take_turns(level, draft))
        for request in list(self.queues.running):
            if request.status is not Status.RUNNING:
                continue  # preempted for an elder one
            if request in draft.turn:
                self._plan_part(draft, request, 1)
            elif not request.is_level and request.num_behind:
                count = self.chunks.count(draft, request, request.num_computed_tokens)
                self._plan_part(draft, request, count)

    def _take_turns(self, level: list[Request], draft: Draft) -> set[Request]:
        """Level requests that step now. One grid unit is kept for prompts, so that they are not stalled."""
        queues, room = self.queues, draft.budget
        behind = sum(request.num_behind > 0 for request in queues.running)
        if queues.waiting or queues.landed or len(level) < behind:
            room -= self.chunks.grid
        if len(level) <= room:
            return set(level)
        # Round robin: on from the one that had the last turn.
        after = bisect.bisect_right(level, self._last_turn, key=queues.order)
        chosen = (level[after:] + level[:after])[: max(room, 0)]
        if chosen:
            self._last_turn = queues.order(chosen[-1])
        return set(chosen)

    def plan_left_out(self, draft: Draft) -> None:
        """Budget that was kept for prompts and that none took goes to the answers that made way."""
        planned = {part.request for part in draft.parts} | draft.turn
        for request in list(self.queues.running):
            if draft.left < 1:
                return
            if request.is_level and request not in planned:
                if draft.parts and not self.holdings.grow(request, request.length):
                    continue  # whoever could make room for it takes part in this step
                draft.promise({request})
                self._plan_part(draft, request, 1)
                if draft.preempted:
                    return

    def _plan_part(self, draft: Draft, request: Request, count: int) -> None:
        if count > 0 and self.preemption.grow(draft, request, request.num_computed_tokens + count):
            draft.add(request, count)
