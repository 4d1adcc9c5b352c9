"""Faults planted between the steps of an engine: what a bug in its handling of states and pages would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from plait.core.plan import Chunk, Export, Kind, StepPlan, StepResult
from plait.engine.core import EngineCore
from plait.kernels.layout import CacheViews
from plait.worker.runner import PreparedStep


class Fault:
    """Watches the steps of ``core`` and does harm after them. ``harm`` counts how often.

    The engine must run one step at a time, and without the prefix cache, so that harm stays in the request it
    was done to.
    """

    def __init__(self, core: EngineCore) -> None:
        assert not core.resolved.async_scheduling
        self.core = core
        self.harm = 0
        runner = core.worker.runner
        self.arena = core.worker.arena
        self.views = CacheViews(self.arena.data, core.worker.model.layout, self.arena.geometry)
        prepare, run = runner.prepare, runner.run

        changed: dict[int, StepPlan] = {}

        def prepare_changed(plan: StepPlan) -> PreparedStep:
            changed[plan.step] = self.before(plan)
            return replace(prepare(changed[plan.step]), plan=plan)  # the engine knows its plan again

        def run_and_harm(step: PreparedStep) -> StepResult:
            result = run(step)
            self.after(changed.pop(step.plan.step))
            return result

        runner.prepare = prepare_changed
        runner.run = run_and_harm

    def before(self, plan: StepPlan) -> StepPlan:
        return plan

    def after(self, plan: StepPlan) -> None:
        raise NotImplementedError


def unfinished(plan: StepPlan) -> list[Chunk]:
    """Chunks behind which their prompt goes on."""
    return [chunk for chunk in plan.chunks if not chunk.sample]


class AnothersState(Fault):
    """Once in each request, in the middle of its prompt, its state becomes that of the request before it."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._kept: dict[str, torch.Tensor] = {}
        self._done: set[str] = set()

    def after(self, plan: StepPlan) -> None:
        for chunk in unfinished(plan):
            assert chunk.slot is not None
            state = self.arena.state(chunk.slot)
            mine = chunk.request_id
            others = [other for other in self._kept if other != mine]
            own = state.clone()
            if others and mine not in self._done and chunk.end >= 32:
                state.copy_(self._kept[others[-1]])
                self._done.add(mine)
                self.harm += 1
            self._kept.pop(mine, None)
            self._kept[mine] = own


class OneTokenOff(Fault):
    """Behind every chunk of a prompt the state lacks the chunk's last token."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._spare = [core.scheduler.cache.loans.lend(Kind.STATE) for _ in range(4)]
        assert all(self._spare)

    def before(self, plan: StepPlan) -> StepPlan:
        spare = iter(self._spare)
        chunks = []
        for chunk in plan.chunks:
            if not chunk.sample and chunk.count > 1:
                export = Export(chunk.end - 1, next(spare).index)
                chunk = replace(chunk, exports=(*chunk.exports, export))
            chunks.append(chunk)
        return replace(plan, chunks=tuple(chunks))

    def after(self, plan: StepPlan) -> None:
        for chunk in unfinished(plan):
            if chunk.count > 1:
                self.arena.copy(Kind.STATE, chunk.exports[-1].state, chunk.slot)
                self.harm += 1


class NoConvolution(Fault):
    """Behind every chunk of a prompt the convolution's columns are zeros."""

    def after(self, plan: StepPlan) -> None:
        for chunk in unfinished(plan):
            for layer in self.views.recurrent:
                layer.conv[chunk.slot].zero_()
            self.harm += 1


class SwappedPages(Fault):
    """A page of each prompt changes places with the same page of another one that is being answered."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._pages: dict[str, tuple[int, ...]] = {}
        self._done: set[str] = set()

    def after(self, plan: StepPlan) -> None:
        size = self.arena.geometry.page_size
        for name in plan.ended:
            self._pages.pop(name, None)
        for chunk in plan.chunks:
            self._pages[chunk.request_id] = chunk.pages[: chunk.end // size]
        ready = [name for name, pages in self._pages.items() if len(pages) > 2 and name not in self._done]
        for one, other in zip(ready[::2], ready[1::2], strict=False):
            number = min(len(self._pages[one]), len(self._pages[other])) // 2
            a, b = (self.arena.page(self._pages[name][number]) for name in (one, other))
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
            self._done |= {one, other}
            self.harm += 1


FAULTS: dict[str, Callable[[EngineCore], Fault]] = {
    "another's state": AnothersState,
    "one token off": OneTokenOff,
    "no convolution": NoConvolution,
    "swapped pages": SwappedPages,
}
