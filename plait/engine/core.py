"""The step loop's body: scheduler and worker joined. No sockets and no text here.

With asynchronous scheduling up to two steps are in flight: one runs, the next is launched behind it. The
scheduler, the cache and the plans belong to the thread that calls ``EngineCore``; the step's thread sees
prepared steps alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from plait.core.cache import Cache
from plait.core.handover import HandOver
from plait.core.limits import Refused, SchedulerConfig
from plait.core.pace import Pace
from plait.core.progress import Progress
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Scheduler
from plait.core.snapshots import SnapshotPolicy
from plait.core.swap import SwapCounters, SwapSpace
from plait.core.tiers import TierCounters, Tiers
from plait.core.tree import Branch, branches
from plait.engine.memory import memory_bytes, parse_bytes
from plait.engine.queue_clock import QueueClock
from plait.engine.resolve import Decision, Resolved
from plait.engine.sharing import finish
from plait.engine.stats import EngineStats
from plait.engine.structured import GrammarQueue
from plait.engine.tier import namespace, open_tier
from plait.engine.tokenizer import load_tokenizer
from plait.text.grammar import Grammars
from plait.transfer.base import Ask, Connector
from plait.transfer.connect import make_connector
from plait.transfer.spans import ArenaMap
from plait.worker.line import StepLine, StepRun
from plait.worker.worker import Worker

NOT_FINITE = (
    "the model's logits are not finite; its weights may be damaged, or overflow in their dtype: try "
    "dtype float32"
)
BLOCKED_SECONDS = 0.02
"""Longest sleep while requests wait for memory that other engines hold."""
WAIT_SECONDS = 0.01
"""Longest sleep while all that there is to do waits for the disk: messages are looked at in between."""
TEND_SECONDS = 0.005
"""Longest sleep without requests while something is on its way to the disk."""
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
            prompt_tokens_beside_answers=resolved.prompt_tokens_beside_answers,
            chunked_prefill=args.enable_chunked_prefill,
            priorities=args.scheduling_policy == "priority",
        )
        target = args.target_itl_ms
        pace = Pace(None if target is None else target / 1000)
        self.tier, decisions = open_tier(resolved, worker.arena)
        self.tiers = None if self.tier is None else Tiers(cache, self.tier)
        self.resolved = replace(resolved, decisions=(*resolved.decisions, *decisions))
        self.swap = SwapSpace(cache, worker.swap_geometry) if worker.swap_geometry is not None else None
        self.connector = self._connect(resolved)
        handover = None
        if self.connector is not None:
            handover = HandOver(cache, self.connector.worker, self.connector.handover)
        self.scheduler = Scheduler(cache, config, pace, self.tiers, self.swap, handover)
        tokenizer = partial(load_tokenizer, args, resolved.path)
        ends = resolved.generation.eos_token_ids
        self.queue_clock = QueueClock()
        self.structured = GrammarQueue(Grammars(tokenizer, resolved.config.vocab_size, ends))
        worker.runner.matcher_of = self.structured.matcher_of
        self._line = StepLine(worker, threaded=resolved.async_scheduling)
        self._steps_ahead = 2 if resolved.async_scheduling else 1
        self._step_seconds = 0.0
        self._idle_seconds = 0.0
        self._last_end: float | None = None
        """when the last step ended, unless there was nothing to do after it"""

    def _connect(self, resolved: Resolved) -> Connector | None:
        """The way to other engines, if one was asked for."""
        if resolved.transfer is None:
            return None
        arena = self.worker.arena
        connector = make_connector(
            resolved.transfer,
            identity=f"{resolved.numerics_id}; all that bits depend on: {namespace(resolved).hex()}",
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
            leave_at=self.scheduler.leave_at(len(tokens)) if ask.leaves and tokens else None,
            source=ask.source,
        )
        if params.structure is None:
            self.scheduler.add(request)
        elif request_id in self.structured:
            raise Refused(f"request id {request_id!r} is in use; choose another")
        else:
            self.structured.add(request)
        self.queue_clock.arrived(request_id)

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
        self.queue_clock.forget(request_id)
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
        outcome = StepOutcome()
        outcome.refused |= self._admit_structured()
        self._step(outcome)
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

    def _step(self, outcome: StepOutcome) -> None:
        while len(self._line) < self._steps_ahead:
            plan = self.scheduler.schedule()
            self._drain(outcome)
            if plan is None:
                break
            self.queue_clock.admitted(admission.request_id for admission in plan.admitted)
            self._line.launch(plan)
        if len(self._line):
            self._take_in(self._line.collect(), outcome)
            self._drain(outcome)
        else:
            outcome.idle = True
            if len(self.structured):
                self.structured.wait(WAIT_SECONDS)
            elif self.tier is not None and self.scheduler.has_work:
                self.tier.wait(WAIT_SECONDS)

    def _drain(self, outcome: StepOutcome) -> None:
        """Go on with hand-overs."""
        progress, failed = self.scheduler.drain()
        outcome.progress += progress
        outcome.failed |= failed

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

    def _take_in(self, step: StepRun, outcome: StepOutcome) -> None:
        self._step_seconds += step.seconds
        if self._last_end is not None:
            self._idle_seconds += step.began - self._last_end
        if step.fault is not None:
            structured = {q.id for q in self.scheduler.requests.values() if q.params.structure is not None}
            failed = set(self.scheduler.fail(step.plan, (*step.fault.request_ids, *step.fault.barred)))
            outcome.failed |= dict.fromkeys(failed.intersection(step.fault.request_ids), NOT_FINITE)
            for request_id in failed.intersection(step.fault.barred):
                outcome.refused[request_id] = OUTGROWN if request_id in structured else ALL_BARRED
                self.structured.outgrown(request_id)
        outcome.progress += self.scheduler.update(step.plan, step.result, step.seconds)
        self._last_end = step.ended if self.has_work else None

    def patience(self, longest: float) -> float:
        """Seconds, up to ``longest``, that one may wait for messages after a step that computed nothing.

        What other engines do ends the wait early: ``wake_descriptor`` becomes readable.
        """
        handover = self.scheduler.handover
        if len(self.structured):
            return 0.0  # ``step`` has waited for a grammar
        if self.scheduler.has_work:
            waits = self.tier is None and handover is not None and any(handover.usage().values())
            return min(longest, BLOCKED_SECONDS) if waits else 0.0  # for the disk ``step`` has waited
        if self.tiers is not None and self.tiers.busy:
            longest = min(longest, TEND_SECONDS)
        due = None if handover is None else handover.next_deadline
        return longest if due is None else min(longest, max(0.0, due - time.monotonic()))

    @property
    def wake_descriptor(self) -> int | None:
        """Readable when another engine has done something; None: there is none to wait for."""
        return None if self.connector is None else self.connector.worker.fileno()

    def reset_prefix_cache(self) -> None:
        self.scheduler.cache.store.clear()

    # -- looking ----------------------------------------------------------------------------

    def prefix_tree(self, most: int) -> list[Branch]:
        """The cached prefixes; at most so many branches."""
        return branches(self.scheduler.cache, most)

    def stats(self) -> EngineStats:
        scheduler, cache, queues = self.scheduler, self.scheduler.cache, self.scheduler.queues
        counters, kept = scheduler.counters, cache.counters
        tier = self.tiers.counters if self.tiers is not None else TierCounters()
        swap = self.swap.counters if self.swap is not None else SwapCounters()
        return EngineStats(
            running=len(queues.running),
            waiting=len(queues.waiting) + len(queues.landed) + len(self.structured),
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
            **self._counts(),
            swaps_total={"out": swap.kept, "in": swap.resumed, "too_full": swap.too_full, "lost": swap.lost},
            tier_written_total={"page": tier.pages_written, "snapshot": tier.snapshots_written},
            tier_read_total={"page": tier.pages_read, "snapshot": tier.snapshots_read},
            tier_writes_skipped_total=tier.writes_skipped,
            tier_reads_failed_total=tier.reads_failed,
            copied_bytes_total=dict(kept.copied_bytes),
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
        """Wait for the step that runs and for what is on its way to the disk, then give the memory back."""
        if self.connector is not None:
            self.connector.worker.close()  # first: until then fetches may write to the arena
        self.structured.close()
        self._line.close()
        if self.tier is not None:
            if not self.has_work:
                self.flush()
            self.tier.close()
        self.worker.close()
