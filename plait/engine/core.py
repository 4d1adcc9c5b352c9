"""The step loop's body: scheduler and worker joined. No sockets and no text here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from plait.core.cache import Cache
from plait.core.handover import HandOver
from plait.core.pace import Pace
from plait.core.plan import StepPlan, StepResult
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Progress, Scheduler, SchedulerConfig
from plait.core.snapshots import SnapshotPolicy
from plait.engine.fingerprint import weights_fingerprint
from plait.engine.memory import memory_bytes
from plait.engine.resolve import Decision, Resolved
from plait.engine.sharing import finish
from plait.engine.stats import EngineStats
from plait.transfer.base import Ask, Connector
from plait.transfer.connect import make_connector
from plait.transfer.spans import ArenaMap
from plait.worker.runner import BadLogits
from plait.worker.worker import Worker

NOT_FINITE = (
    "the model's logits are not finite; its weights may be damaged, or overflow in their dtype: try "
    "dtype float32"
)
BLOCKED_SECONDS = 0.02
"""Longest sleep while requests wait for memory that other engines hold."""
ALL_BARRED = "min_tokens bars every token that could come; ask for fewer stop_token_ids, or min_tokens=0"


@dataclass(slots=True)
class StepOutcome:
    """What a step did for requests."""

    progress: list[Progress] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """requests that ended without a usable result, and why"""
    refused: dict[str, str] = field(default_factory=dict)
    """requests that turned out to ask for the impossible, and why"""
    idle: bool = False
    """nothing could be computed"""


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
        pace = Pace(None if target is None else target / 1000)
        self.connector = self._connect(resolved)
        handover = None
        if self.connector is not None:
            handover = HandOver(cache, self.connector.worker, self.connector.handover)
        self.scheduler = Scheduler(cache, config, pace, handover)
        self._step_seconds = 0.0

    def _connect(self, resolved: Resolved) -> Connector | None:
        """The way to other engines, if one was asked for."""
        if resolved.transfer is None:
            return None
        arena = self.worker.arena
        connector = make_connector(
            resolved.transfer,
            identity=f"{resolved.numerics_id}; model {weights_fingerprint(resolved)}",
            arena=arena.data,
            descriptor=arena.descriptor,
            arena_map=ArenaMap.of(resolved.layout, arena.geometry),
        )
        host, port = connector.worker.address
        found = Decision("peers", f"{host}:{port}", f"engine {connector.engine_id} listens there")
        self.resolved = replace(resolved, decisions=(*resolved.decisions, found))
        return connector

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
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        """Queue a request.

        ``kv_transfer_params``: whether its prompt is computed for another engine, or was by another.

        Raises:
            Refused: it could never fit; the message has the arithmetic.
            ValueError: ``kv_transfer_params`` that cannot be served.
        """
        ask = self._read(kv_transfer_params, len(tokens))
        if ask.leaves:
            params, max_tokens = replace(params, prompt_logprobs=None), 1
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
                leave_at=self.scheduler.leave_at(len(tokens)) if ask.leaves and tokens else None,
                source=ask.source,
            )
        )

    def _read(self, params: dict[str, Any] | None, num_prompt_tokens: int) -> Ask:
        if params is None:
            return Ask()
        if self.connector is None:
            raise ValueError(
                "kv_transfer_params: this engine exchanges memory with no other; start it with "
                "--kv-transfer-config"
            )
        return self.connector.scheduler.read(params, num_prompt_tokens)

    def reply(self, progress: Progress) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the answer to a request that was computed for another engine."""
        if progress.offer is None:
            return None
        assert self.connector is not None
        return self.connector.scheduler.write(progress.offer)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> StepOutcome:
        """Plan and run one step."""
        plan = self.scheduler.schedule()
        outcome = StepOutcome(idle=plan is None)
        if plan is not None:
            self._run(plan, outcome)
        progress, failed = self.scheduler.drain()
        outcome.progress += progress
        outcome.failed |= failed
        return outcome

    def _run(self, plan: StepPlan, outcome: StepOutcome) -> None:
        started = time.perf_counter()
        result = self._execute(plan, outcome)
        seconds = time.perf_counter() - started
        self._step_seconds += seconds
        outcome.progress = self.scheduler.update(plan, result, seconds)

    def _execute(self, plan: StepPlan, outcome: StepOutcome) -> StepResult:
        try:
            return self.worker.execute(plan)
        except BadLogits as fault:
            outcome.failed = dict.fromkeys(fault.request_ids, NOT_FINITE)
            outcome.refused = dict.fromkeys(fault.barred, ALL_BARRED)
            for request_id in (*fault.request_ids, *fault.barred):
                self.scheduler.cancel(request_id)
            return fault.result

    def patience(self, longest: float) -> float:
        """Seconds, up to ``longest``, that one may wait for messages after a step that computed nothing.

        What other engines do ends the wait early: ``wake_descriptor`` becomes readable.
        """
        handover = self.scheduler.handover
        if self.scheduler.has_work:
            busy = handover is not None and any(handover.usage().values())
            return min(longest, BLOCKED_SECONDS) if busy else 0.0
        due = None if handover is None else handover.next_deadline
        return longest if due is None else min(longest, max(0.0, due - time.monotonic()))

    @property
    def wake_descriptor(self) -> int | None:
        """Readable when another engine has done something; None: there is none to wait for."""
        return None if self.connector is None else self.connector.worker.fileno()

    def reset_prefix_cache(self) -> None:
        self.scheduler.cache.reset_prefixes()

    # -- looking ----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        counters, kept = scheduler.counters, cache.counters
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.landed),
            arena_bytes=cache.geometry.num_slabs * cache.geometry.slab_bytes,
            weight_bytes=self.worker.weight_bytes,
            memory_bytes=memory_bytes(),
            steps_total=counters.steps,
            step_seconds_total=self._step_seconds,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            computed_tokens_total=counters.computed_tokens,
            generation_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            requests_total=dict(counters.finished),
            prefix_hits_total=dict(kept.hits),
            snapshots_taken_total=dict(kept.snapshots_taken),
            snapshots_evicted_total=kept.snapshots_evicted,
            pages_evicted_total=kept.pages_evicted,
            units_moved_total=kept.units_moved,
            exports_skipped_total=kept.exports_skipped,
            **self._counts(),
        )

    def _counts(self) -> dict[str, Any]:
        """Units by state, and what hand-over has done."""
        handover, usage = self.scheduler.handover, self.scheduler.cache.usage()
        if handover is None:
            return {**usage}
        counters = handover.counters
        return {
            **usage,
            **handover.usage(),
            "leases_total": counters.offered,
            "leases_ended_total": dict(counters.returned),
            "prompts_received_total": counters.received,
            "received_tokens_total": counters.received_tokens,
            "fetches_failed_total": counters.failed,
            "fetches_forgone_total": counters.forgone,
        }

    def close(self) -> None:
        if self.connector is not None:
            self.connector.worker.close()  # first: until then fetches may write to the arena
        self.worker.close()
