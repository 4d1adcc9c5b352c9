"""The step loop's body: scheduler and worker joined. No sockets and no text here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from plait.core.cache import Cache
from plait.core.pace import Pace
from plait.core.plan import StepPlan, StepResult
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Progress, Scheduler, SchedulerConfig
from plait.core.snapshots import SnapshotPolicy
from plait.engine.memory import memory_bytes
from plait.engine.resolve import Resolved
from plait.engine.sharing import finish
from plait.engine.stats import EngineStats
from plait.worker.runner import BadLogits
from plait.worker.worker import Worker

NOT_FINITE = (
    "the model's logits are not finite; its weights may be damaged, or overflow in their dtype: try "
    "dtype float32"
)
ALL_BARRED = "min_tokens bars every token that could come; ask for fewer stop_token_ids, or min_tokens=0"


@dataclass(slots=True)
class StepOutcome:
    """What a step did for requests."""

    progress: list[Progress] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """requests that ended without a usable result, and why"""
    refused: dict[str, str] = field(default_factory=dict)
    """requests that turned out to ask for the impossible, and why"""


class EngineCore:
    """One scheduler, one cache, one worker.

    Args:
        resolved: the settings that hold; see ``plait.engine.resolve``.
        worker: with its arena allocated.
    """

    def __init__(self, resolved: Resolved, worker: Worker) -> None:
        assert worker.geometry is not None
        self.resolved = resolved
        self.worker = worker
        backend = resolved.backend
        cache = Cache(
            worker.geometry,
            SnapshotPolicy.of(worker.geometry, resolved.args.snapshot_interval),
            numerics_id=resolved.numerics_id,
            enabled=resolved.args.enable_prefix_caching,
            row_invariant=backend.row_invariant,
        )
        args = resolved.args
        config = SchedulerConfig(
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            max_model_len=resolved.max_model_len,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            chunked_prefill=args.enable_chunked_prefill,
            priorities=args.scheduling_policy == "priority",
        )
        target = args.target_itl_ms
        self.scheduler = Scheduler(cache, config, Pace(None if target is None else target / 1000))
        self._step_seconds = 0.0

    @classmethod
    def start(cls, resolved: Resolved, worker: Worker) -> EngineCore:
        """Allocate the arena, measure what is to be measured, and join the parts."""
        return cls(finish(resolved, worker), worker)

    # -- requests ---------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        priority: int = 0,
        cache_salt: str = "",
        tail: int | None = None,
        boundaries: tuple[int, ...] = (),
    ) -> None:
        """Queue a request.

        Raises:
            Refused: it could never fit; the message has the arithmetic.
        """
        ends = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends.update(self.resolved.generation.eos_token_ids)
        self.scheduler.add(
            Request(
                id=request_id,
                tokens=list(tokens),
                num_prompt_tokens=len(tokens),
                params=params,
                seed=seed,
                max_tokens=max_tokens,
                end_token_ids=frozenset(ends),
                priority=priority,
                cache_salt=cache_salt,
                tail=tail,
                boundaries=boundaries,
            )
        )

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> StepOutcome:
        """Plan and run one step."""
        plan = self.scheduler.schedule()
        if plan is None:
            return StepOutcome()
        outcome = StepOutcome()
        started = time.perf_counter()
        result = self._execute(plan, outcome)
        seconds = time.perf_counter() - started
        self._step_seconds += seconds
        outcome.progress = self.scheduler.update(plan, result, seconds)
        return outcome

    def _execute(self, plan: StepPlan, outcome: StepOutcome) -> StepResult:
        try:
            return self.worker.execute(plan)
        except BadLogits as fault:
            outcome.failed = dict.fromkeys(fault.request_ids, NOT_FINITE)
            outcome.refused = dict.fromkeys(fault.barred, ALL_BARRED)
            for request_id in (*fault.request_ids, *fault.barred):
                self.scheduler.cancel(request_id)
            return fault.result

    def reset_prefix_cache(self) -> None:
        self.scheduler.cache.reset_prefixes()

    # -- looking ----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        counters, kept = scheduler.counters, cache.counters
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            **cache.usage(),
            arena_bytes=cache.geometry.num_slabs * cache.geometry.slab_bytes,
            weight_bytes=self.worker.weight_bytes,
            memory_bytes=memory_bytes(),
            steps_total=counters.steps,
            step_seconds_total=self._step_seconds,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            computed_tokens_total=counters.computed_tokens,
            recomputed_tokens_total=counters.recomputed_tokens,
            generation_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            requests_total=dict(counters.finished),
            prefix_hits_total=dict(kept.hits),
            snapshots_taken_total=dict(kept.snapshots_taken),
            snapshots_evicted_total=kept.snapshots_evicted,
            pages_evicted_total=kept.pages_evicted,
            units_moved_total=kept.units_moved,
            exports_skipped_total=kept.exports_skipped,
            copied_bytes_total=dict(kept.copied_bytes),
        )

    def close(self) -> None:
        self.worker.close()
