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


class NoState(Fault):
    """Behind every chunk of a prompt the state is empty: what goes on is carried by attention alone."""

    def after(self, plan: StepPlan) -> None:
        for chunk in unfinished(plan):
            self.arena.state(chunk.slot).zero_()
            self.harm += 1


class AnothersPages(Fault):
    """When a prompt has been computed, its full pages become those of the request before it, as if both had
    changed places."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._kept: list[torch.Tensor] = []
        self._done: set[str] = set()

    def after(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if not chunk.sample or chunk.request_id in self._done:
                continue
            self._done.add(chunk.request_id)
            full = chunk.pages[: chunk.end // self.arena.geometry.page_size]
            own = [self.arena.page(page).clone() for page in full]
            for page, others in zip(full, self._kept, strict=False):
                self.arena.page(page).copy_(others)
            self.harm += bool(self._kept)
            self._kept = own


FAULTS: dict[str, Callable[[EngineCore], Fault]] = {
    "another's state": AnothersState,
    "one token off": OneTokenOff,
    "no convolution": NoConvolution,
    "no state": NoState,
    "another's pages": AnothersPages,
}
