"""Steps in flight: launched, and not known to be over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from plait.core.arena import IntegrityError
from plait.core.cache import Cache
from plait.core.counters import SchedulerCounters
from plait.core.draft import Draft, Planned
from plait.core.plan import Admission, Chunk, Export, StepPlan, StepResult
from plait.core.request import PendingExport, Request


class Flight:
    """Freezes drafts to plans, and takes them back in the order in which they were launched."""

    def __init__(self, cache: Cache, counters: SchedulerCounters) -> None:
        self.cache = cache
        self.counters = counters
        self._steps: deque[tuple[StepPlan, list[Planned]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    # -- launching --------------------------------------------------------------------------

    def launch(self, draft: Draft, ended: tuple[str, ...]) -> StepPlan:
        """Freeze the draft, and move the cursors. Indices of units are read only here, after all moves.

        ``ended``: requests that the worker shall forget first.
        """
        plan = StepPlan(
            step=draft.step,
            chunks=tuple(self._freeze(part) for part in draft.parts),
            copies=self.cache.memory.launch(draft.step),
            admitted=tuple(self._admission(request) for request in draft.admitted),
            ended=ended,
        )
        for part in draft.parts:
            request = part.request
            self.counters.recomputed_tokens += max(0, min(part.end, request.num_reached_tokens) - part.start)
            request.num_reached_tokens = max(part.end, request.num_reached_tokens)
            request.num_computed_tokens = part.end
            request.num_awaited += part.sample
        self._steps.append((plan, draft.parts))
        self.counters.steps += 1
        self.counters.computed_tokens += draft.tokens
        return plan

    def _freeze(self, part: Planned) -> Chunk:
        request = part.request
        known = tuple(request.tokens[part.start : part.end])
        return Chunk(
            request_id=request.id,
            tokens=known,
            start=part.start,
            pages=self.cache.holdings.page_table(request, part.end),
            slot=None if request.slot is None else request.slot.index,
            exports=tuple(Export(export.position, export.state.index) for export in part.exports),
            sample=part.sample,
            awaited=part.count - len(known),
        )

    @staticmethod
    def _admission(request: Request) -> Admission:
        return Admission(
            request_id=request.id,
            params=request.params,
            seed=request.seed,
            tokens=tuple(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            end_token_ids=tuple(sorted(request.end_token_ids)),
        )

    # -- landing ----------------------------------------------------------------------------

    def land(self, plan: StepPlan, result: StepResult) -> list[Planned]:
        """The oldest step is over; gives its parts, in the plan's order.

        Raises:
            IntegrityError: ``plan`` is not the oldest one's, or ``result`` is another step's.
        """
        expected, parts = self._steps.popleft()
        if expected is not plan or result.step != plan.step:
            raise IntegrityError(f"step {result.step} came back before step {expected.step}")
        self.cache.memory.complete(plan.step)
        return parts

    def failing(self, plan: StepPlan) -> list[Planned]:
        """Parts of the oldest step, which is about to land.

        Raises:
            IntegrityError: ``plan`` is not the oldest one's.
        """
        launched, parts = self._steps[0]
        if launched is not plan:
            raise IntegrityError(f"step {plan.step} failed before step {launched.step} was over")
        return parts

    # -- looking ----------------------------------------------------------------------------

    def parts(self) -> Iterator[Planned]:
        """Of all steps, the oldest first."""
        for _, parts in self._steps:
            yield from parts

    def pending_exports(self) -> Iterator[PendingExport]:
        for part in self.parts():
            yield from part.exports
