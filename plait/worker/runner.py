"""Executes step plans: the one place where plans become tensors and logits become tokens.

A step is executed in two halves. ``prepare`` takes in the plan and builds the batch, which may happen while
earlier steps still run, and in another thread; ``run`` fills in the tokens that were awaited, computes and
samples. Each half keeps the order of the plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.core.plan import Admission, Chunk, ChunkResult, Copy, StepPlan, StepResult, TokenLogprobs, Way
from plait.kernels.batch import Batch
from plait.kernels.layout import CacheViews
from plait.worker.arena import Arena
from plait.worker.batching import PlanError, build_batch, check_chunks
from plait.worker.logprobs import token_logprobs
from plait.worker.request import RequestState
from plait.worker.sampler import Row, sample
from plait.worker.structure import Matcher


class Model(Protocol):
    def forward(self, batch: Batch, caches: CacheViews) -> torch.Tensor:
        """Logits, float32 [R, vocabulary], of ``batch.logit_rows``; reads and advances the cache."""
        ...


class BadLogits(RuntimeError):
    """No token could be chosen for some requests; the step's others are whole.

    Attributes:
        request_ids: requests whose logits hold NaN, +inf, or nothing above -inf; end them.
        barred: requests whose own parameters leave no token; end them.
        result: the step's result, in which their chunks have no tokens and no log-probabilities.
    """

    def __init__(
        self, request_ids: tuple[str, ...], result: StepResult, barred: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"step {result.step}: no token for {', '.join((*request_ids, *barred))}")
        self.request_ids = request_ids
        self.barred = barred
        self.result = result


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """All of a step that does not depend on tokens still being sampled."""

    plan: StepPlan
    states: tuple[RequestState, ...] = ()
    """of the requests of its chunks"""
    scored: tuple[range, ...] = ()
    """for each chunk, positions whose next token belongs to the prompt and shall be scored"""
    batch: Batch | None = None
    """None without chunks"""

    def fill_in(self) -> None:
        """Put the awaited tokens, which are known by now, into the batch.

        Where the step before found none, the row's request has failed and is computed in vain.
        """
        if self.batch is None:
            return
        rows: list[int] = []
        tokens: list[int] = []
        for chunk, state, end in zip(
            self.plan.chunks, self.states, self.batch.query_start_host[1:], strict=True
        ):
            if chunk.awaited and not state.failed:
                if len(state.tokens) < chunk.end:
                    raise PlanError(
                        f"step {self.plan.step} runs before request {state.request_id!r} has its token"
                    )
                rows += range(end - chunk.awaited, end)
                tokens += state.tokens[chunk.end - chunk.awaited : chunk.end]
        if rows:
            ids = self.batch.token_ids
            ids[torch.tensor(rows, device=ids.device)] = torch.tensor(tokens, device=ids.device)


class ModelRunner:
    """Runs a model over an arena, step by step, and samples.

    Args:
        model: gives logits for a flat batch.
        caches: views of ``arena`` for the model.
        arena: pages and states.
        vocab_size: columns of the logits.
        device: of the model's tensors.
        swap: the swap buffer, in host memory.

    Attributes:
        matcher_of: gives the matcher of a grammar, at its beginning; it is copied, never advanced.
    """

    matcher_of: Callable[[str], Matcher] | None = None

    def __init__(
        self,
        model: Model,
        caches: CacheViews,
        arena: Arena,
        *,
        vocab_size: int,
        device: torch.device | str,
        swap: Arena | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self._arena = arena
        self._swap = swap
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._requests: dict[str, RequestState] = {}
        self._step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Prepare and run one step. Raises as the two do."""
        return self.run(self.prepare(plan))

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Take in a plan; steps prepared before it need not have run.

        Raises:
            PlanError: the plan is inconsistent.
        """
        if plan.step != self._step + 1:
            raise PlanError(f"step {plan.step} was planned, but step {self._step + 1} is next")
        self._step = plan.step
        for request_id in plan.ended:
            if self._requests.pop(request_id, None) is None:
                raise PlanError(f"step {plan.step} ends request {request_id!r}, which is not admitted")
        for admission in plan.admitted:
            self._admit(admission)
        check_chunks(plan.chunks, self._requests, self._arena.geometry)
        if not plan.chunks:
            return PreparedStep(plan)
        states = tuple(self._requests[chunk.request_id] for chunk in plan.chunks)
        scored = tuple(itertools.starmap(_scored_positions, zip(plan.chunks, states, strict=True)))
        wanted = [
            [*positions, *((chunk.end - 1,) if chunk.sample else ())]
            for positions, chunk in zip(scored, plan.chunks, strict=True)
        ]
        batch = build_batch(
            plan.chunks,
            wanted,
            num_pages=self._arena.geometry.num_pages,
            vocab_size=self._vocab_size,
            device=self._device,
        )
        for chunk, state in zip(plan.chunks, states, strict=True):
            state.length += chunk.sample
        return PreparedStep(plan, states, scored, batch)

    @torch.inference_mode()
    def run(self, step: PreparedStep) -> StepResult:
        """Run a prepared step, after all those that were prepared before it.

        Raises:
            BadLogits: some requests have no usable logits; carries the result of the others.
        """
        for copy in step.plan.copies:
            self._copy(copy)
        if step.batch is None:
            return StepResult(step.plan.step)
        step.fill_in()
        logits = self._model.forward(step.batch, self._caches)
        return self._results(step, logits)

    def _copy(self, copy: Copy) -> None:
        if copy.way is Way.WITHIN:
            self._arena.copy(copy.kind, copy.source, copy.target)
            return
        if self._swap is None:
            raise PlanError(f"{copy} goes through a swap buffer, and there is none")
        here, there = self._arena, self._swap
        if copy.way is Way.OUT:
            there.unit(copy.kind, copy.target).copy_(here.unit(copy.kind, copy.source))
        else:
            here.unit(copy.kind, copy.target).copy_(there.unit(copy.kind, copy.source))

    def _admit(self, admission: Admission) -> None:
        if admission.request_id in self._requests:
            raise PlanError(f"request {admission.request_id!r} is admitted already; end it first")
        if not 1 <= admission.num_prompt_tokens <= len(admission.tokens):
            raise PlanError(
                f"request {admission.request_id!r} has {admission.num_prompt_tokens} prompt tokens "
                f"among {len(admission.tokens)} tokens; there must be at least one, and no more than tokens"
            )
        matcher, structure = None, admission.params.structure
        if structure is not None:
            if self.matcher_of is None:
                raise PlanError(f"request {admission.request_id!r} has a grammar, and nothing here reads it")
            matcher = self.matcher_of(structure.grammar).deep_copy()
        self._requests[admission.request_id] = RequestState(admission, self._vocab_size, matcher)

    @staticmethod
    def _results(step: PreparedStep, logits: torch.Tensor) -> StepResult:
        """Sample, and score prompts. ``logits``: for each chunk its scored rows, then the sampled one."""
        plan, states, scored = step.plan, step.states, step.scored
        ends = itertools.accumulate(len(p) + c.sample for p, c in zip(scored, plan.chunks, strict=True))
        sampled = [
            (end - 1, Row(state, chunk.end))
            for end, state, chunk in zip(ends, states, plan.chunks, strict=True)
            if chunk.sample and not state.failed
        ]
        at, rows = [row for row, _ in sampled], [row for _, row in sampled]
        samples = sample(logits if len(at) == len(logits) else logits[at], rows)
        drawn = zip(samples.tokens, samples.logprobs, strict=True)

        barred = {rows[r].request.request_id for r in samples.barred}
        results, bad, first = [], [], 0
        for chunk, state, positions in zip(plan.chunks, states, scored, strict=True):
            size, row = len(positions), first
            first += size + chunk.sample
            if state.failed:  # in the step before, when this one was under way
                results.append(ChunkResult(chunk.request_id))
                continue
            prompt = _score_prompt(state, chunk.start, logits[row : row + size]) if size else ()
            token, entry = next(drawn) if chunk.sample else (None, None)
            if prompt is None or (chunk.sample and token is None):
                state.failed = True
                bad.append(chunk.request_id)
                results.append(ChunkResult(chunk.request_id))
                continue
            if token is not None:
                state.append(token)
            tokens = () if token is None else (token,)
            logprobs = () if entry is None else (entry,)
            results.append(ChunkResult(chunk.request_id, tokens, logprobs, prompt))
        result = StepResult(plan.step, tuple(results))
        if bad:
            raise BadLogits(tuple(r for r in bad if r not in barred), result, tuple(sorted(barred)))
        return result


def _scored_positions(chunk: Chunk, state: RequestState) -> range:
    """Positions of the chunk whose next token belongs to the prompt and shall be scored."""
    if state.params.prompt_logprobs is None:
        return range(0)
    return range(chunk.start, max(chunk.start, min(chunk.end, state.num_prompt_tokens - 1)))


def _score_prompt(state: RequestState, start: int, logits: torch.Tensor) -> tuple[TokenLogprobs, ...] | None:
    """Log-probabilities of the prompt tokens from ``start + 1`` on, by ``logits`` [S, V] of the ones before.

    None where a row has no finite maximum.
    """
    count = logits.shape[0]
    if not bool(logits.amax(-1).isfinite().all()):
        return None
    alternatives = state.params.prompt_logprobs or 0
    return tuple(token_logprobs(logits, state.tokens[start + 1 : start + 1 + count], [alternatives] * count))
