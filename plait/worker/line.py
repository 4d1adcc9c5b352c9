"""Steps on their way through the worker: launched, then collected in the same order.

With a thread of its own a line runs one step after the other while whoever launched them plans the next; its
kernels leave Python's lock alone while they compute. Without one, a step runs when it is collected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from plait.core.plan import StepPlan, StepResult
from plait.worker.runner import BadLogits, PreparedStep
from plait.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class StepRun:
    """A step that is over. Times are those of ``time.perf_counter``."""

    plan: StepPlan
    result: StepResult
    began: float
    ended: float
    fault: BadLogits | None = None
    """names the requests for which no token was found"""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class StepLine:
    """Launches steps of one worker and collects what they gave.

    Args:
        worker: with its arena allocated.
        threaded: run steps in a thread of their own.
    """

    def __init__(self, worker: Worker, threaded: bool) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, "step") if threaded else None
        self._steps: deque[Callable[[], StepRun]] = deque()
        self._broken: BaseException | None = None

    def __len__(self) -> int:
        """Steps launched and not collected."""
        return len(self._steps)

    def launch(self, plan: StepPlan) -> None:
        """Prepare a step, here and now; it runs after those launched before it.

        Raises:
            PlanError: the plan is inconsistent.
        """
        prepared = self._worker.runner.prepare(plan)
        if self._thread is None:
            self._steps.append(lambda: self._run(prepared))
        else:
            self._steps.append(self._thread.submit(self._run, prepared).result)

    def collect(self) -> StepRun:
        """What the oldest step gave, once it is over. Raises what went wrong in it, but for BadLogits."""
        return self._steps.popleft()()

    def _run(self, step: PreparedStep) -> StepRun:
        if self._broken is not None:  # what it left behind means nothing: run no step on it
            raise self._broken
        began, fault = time.perf_counter(), None
        try:
            result = self._worker.runner.run(step)
        except BadLogits as bad:
            result, fault = bad.result, bad
        except BaseException as error:
            self._broken = error
            raise
        return StepRun(step.plan, result, began, time.perf_counter(), fault)

    def close(self) -> None:
        """Wait for the step that runs; drop the others."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._steps.clear()
