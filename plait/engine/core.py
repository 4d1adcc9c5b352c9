"""The step loop's body: scheduler and worker joined. No sockets and no text here.

With asynchronous scheduling up to two steps are in flight: one runs, the next is launched behind it. The
scheduler, the cache and the plans belong to the thread that calls ``EngineCore``; the step's thread sees
prepared steps alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial

from plait.core.cache import Cache
from plait.core.pace import Pace
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Progress, Refused, Scheduler, SchedulerConfig
from plait.core.snapshots import SnapshotPolicy
from plait.core.swap import SwapCounters, SwapSpace
from plait.core.tiers import TierCounters, Tiers
from plait.core.tree import Branch, branches
from plait.engine.memory import memory_bytes, parse_bytes
from plait.engine.resolve import Resolved
from plait.engine.sharing import finish
from plait.engine.stats import EngineStats
from plait.engine.structured import GrammarQueue
from plait.engine.tier import open_tier
from plait.engine.tokenizer import load_tokenizer
from plait.text.grammar import Grammars
from plait.worker.line import StepLine, StepRun
from plait.worker.worker import Worker

NOT_FINITE = (
    "the model's logits are not finite; its weights may be damaged, or overflow in their dtype: try "
    "dtype float32"
)
WAIT_SECONDS = 0.01
"""Longest sleep while all that there is to do waits for the disk: messages are looked at in between."""
FLUSH_SECONDS = 2.0
"""How long the end of the engine may take for what waits to be written to the disk."""

OUTGROWN = (
    "nothing more can come in this answer: its grammar has grown beyond its limits, or asks for what the "
    "model's tokens cannot write; simplify the schema or grammar"
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
        args, backend = resolved.args, resolved.backend
        cache = Cache(
            worker.geometry,
            SnapshotPolicy.of(worker.geometry, resolved.args.snapshot_interval),
            numerics_id=resolved.numerics_id,
            enabled=resolved.args.enable_prefix_caching,
            row_invariant=backend.row_invariant,
            budget=None if args.prefix_cache_budget is None else parse_bytes(args.prefix_cache_budget),
        )
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
        self.tier, decisions = open_tier(resolved, worker.arena)
        self.tiers = None if self.tier is None else Tiers(cache, self.tier)
        self.resolved = replace(resolved, decisions=(*resolved.decisions, *decisions))
        self.swap = SwapSpace(cache, worker.swap_geometry) if worker.swap_geometry is not None else None
        self.scheduler = Scheduler(cache, config, pace, self.tiers, self.swap)
        tokenizer = partial(load_tokenizer, args, resolved.path)
        ends = resolved.generation.eos_token_ids
        self.structured = GrammarQueue(Grammars(tokenizer, resolved.config.vocab_size, ends))
        worker.runner.matcher_of = self.structured.matcher_of
        self._line = StepLine(worker, threaded=resolved.async_scheduling)
        self._steps_ahead = 2 if resolved.async_scheduling else 1
        self._step_seconds = 0.0
        self._idle_seconds = 0.0
        self._last_end: float | None = None
        """when the last step ended, unless there was nothing to do after it"""

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
        request = Request(
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
        if params.structure is None:
            self.scheduler.add(request)
        elif request_id in self.structured:
            raise Refused(f"request id {request_id!r} is in use; choose another")
        else:
            self.structured.add(request)

    def cancel(self, request_id: str) -> bool:
        return self.structured.forget(request_id) | self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Requests wait or run, or a step is in flight."""
        return self.scheduler.has_work or len(self._line) > 0 or len(self.structured) > 0

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> StepOutcome:
        """Launch what can be planned, then take in the oldest step in flight, once it is over.

        With asynchronous scheduling the next step is launched before this one is waited for, and runs while
        its outcome is on the way to clients: their messages are handled, and the step after it is planned.
        """
        refused = self._admit_structured()
        outcome = self._step()
        outcome.refused |= refused
        ended = [p.request_id for p in outcome.progress if p.finish_reason is not None]
        for request_id in (*ended, *outcome.failed, *outcome.refused):
            self.structured.forget(request_id)
        return outcome

    def _admit_structured(self) -> dict[str, str]:
        """Queue the requests whose grammar is there; why others cannot be served."""
        ready, refused = self.structured.take()
        for request in ready:
            try:
                self.scheduler.add(request)
            except Refused as fault:
                refused[request.id] = str(fault)
        return refused

    def _step(self) -> StepOutcome:
        while len(self._line) < self._steps_ahead:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._line.launch(plan)
        if len(self._line):
            return self._take_in(self._line.collect())
        if len(self.structured):
            self.structured.wait(WAIT_SECONDS)
        elif self.tier is not None:
            self.tier.wait(WAIT_SECONDS)
        return StepOutcome()

    def tend(self) -> bool:
        """Without requests: keep writing to the disk what waits for it. Whether there is more to do."""
        if self.tiers is None or not self.tiers.busy:
            return False
        self.tiers.collect()
        self.tiers.spill()
        return self.tiers.busy

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Write what waits for the disk. Whether all of it got there in time; call it without requests."""
        end = time.monotonic() + seconds
        while self.tend():
            assert self.tier is not None
            if time.monotonic() > end:
                return False
            self.tier.wait(WAIT_SECONDS)
        return True

    def _take_in(self, step: StepRun) -> StepOutcome:
        self._step_seconds += step.seconds
        if self._last_end is not None:
            self._idle_seconds += step.began - self._last_end
        outcome = StepOutcome()
        if step.fault is not None:
            structured = {q.id for q in self.scheduler.requests.values() if q.params.structure is not None}
            failed = set(self.scheduler.fail(step.plan, (*step.fault.request_ids, *step.fault.barred)))
            outcome.failed = dict.fromkeys(failed.intersection(step.fault.request_ids), NOT_FINITE)
            for request_id in failed.intersection(step.fault.barred):
                outcome.refused[request_id] = OUTGROWN if request_id in structured else ALL_BARRED
        outcome.progress = self.scheduler.update(step.plan, step.result, step.seconds)
        self._last_end = step.ended if self.has_work else None
        return outcome

    def reset_prefix_cache(self) -> None:
        self.scheduler.cache.reset_prefixes()

    # -- looking ----------------------------------------------------------------------------

    def prefix_tree(self, most: int) -> list[Branch]:
        """The cached prefixes; at most so many branches."""
        return branches(self.scheduler.cache, most)

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        counters, kept = scheduler.counters, cache.counters
        tier = self.tiers.counters if self.tiers is not None else TierCounters()
        swap = self.swap.counters if self.swap is not None else SwapCounters()
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self.structured),
            **cache.usage(),
            arena_bytes=cache.geometry.num_slabs * cache.geometry.slab_bytes,
            weight_bytes=self.worker.weight_bytes,
            memory_bytes=memory_bytes(),
            steps_total=counters.steps,
            step_seconds_total=self._step_seconds,
            idle_seconds_total=self._idle_seconds,
            cpu_seconds_total=time.process_time(),
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
            swaps_total={"out": swap.kept, "in": swap.resumed, "too_full": swap.too_full, "lost": swap.lost},
            tier_written_total={"page": tier.pages_written, "snapshot": tier.snapshots_written},
            tier_read_total={"page": tier.pages_read, "snapshot": tier.snapshots_read},
            tier_writes_skipped_total=tier.writes_skipped,
            tier_reads_failed_total=tier.reads_failed,
            copied_bytes_total=dict(kept.copied_bytes),
        )

    def close(self) -> None:
        """Wait for the step that runs and for what is on its way to the disk, then give the memory back."""
        self.structured.close()
        self._line.close()
        if self.tier is not None:
            if not self.has_work:
                self.flush()
            self.tier.close()
        self.worker.close()
