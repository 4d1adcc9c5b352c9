"""A scheduler over symbolic memory, and all that happens to it, drawn at random from one seed.

Steps are launched, run and land (the scheduler learns of them) in order and late, at moments drawn at random,
as a device's would; an outside actor borrows memory and writes it at once, out of order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from symbolic import VOCABULARY, Corruption, SymbolicWorker, answer

from plait.core.arena import Unit
from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.handover import HandOver
from plait.core.limits import Refused, SchedulerConfig
from plait.core.plan import Kind, StepPlan, StepResult
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Scheduler
from plait.core.swap import SwapSpace
from plait.core.tiers import Tiers


class Driven:
    """Something that is driven by ``tick`` until enough steps were launched, and then until all has ended."""

    steps: int

    def tick(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        """No more arrivals: everything ends, and all memory returns."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        ticks = 0
        while self.steps < steps:
            self.tick()
            ticks += 1
            if ticks > 1000 + 100 * steps:
                raise AssertionError("requests wait and nothing is scheduled")
        self.drain()


@dataclass
class World(Driven):
    """A scheduler, a symbolic worker, clients and an outside actor, driven by one random seed."""

    answer_lengths: ClassVar[list[int]] = [1, 2, 8, 30]
    sequences: ClassVar[list[int]] = [1, 2, 5, 40]
    """most requests that run at once: one of these"""

    seed: int
    depth: int = 1
    """steps in flight at most"""
    check_every: int = 1
    cancel_rate: float = 0.01
    make_swap: type[SwapSpace] | None = None
    make_tiers: Callable[[World], Tiers] | None = None
    rng: random.Random = field(init=False)
    expected: dict[str, tuple[list[int], int, frozenset[int]]] = field(default_factory=dict)
    asked: dict[str, tuple[list[int], int, frozenset[int]]] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    loans: list[tuple[Unit, int]] = field(default_factory=list)
    steps: int = 0
    finished: int = 0
    refused: int = 0
    awaited: int = 0
    """tokens that were launched before they were known"""
    late: int = 0
    """requests that had been launched once more when they were found to have ended"""

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        grid = rng.choice([1, 1, 4])
        page_size = rng.choice([2, 4, 8])
        page_bytes = 64 * rng.choice([1, 4])
        state_bytes = rng.choice([0, 10, 64, 200, 600])
        slabs = rng.choice([6, 12, 30, 100])
        geometry = Geometry(page_size, page_bytes, state_bytes, grid, 0)
        arena = geometry.slab_bytes * slabs * (3 if geometry.slab_pages == 1 else 1) + rng.randrange(64)
        self.geometry = Geometry(page_size, page_bytes, state_bytes, grid, arena)
        sharing = {"enabled": rng.random() < 0.85, "row_invariant": rng.random() < 0.7}
        budget = rng.choice([grid, grid + 1, 7, 16, 64, 300])
        config = SchedulerConfig(
            max_num_batched_tokens=max(budget, grid),
            max_num_seqs=rng.choice(self.sequences),
            max_model_len=max(2, self.geometry.longest_request()),
            long_prefill_token_threshold=rng.choice([0, 0, 5]),
            prompt_tokens_beside_answers=rng.choice([0, 0, 3, 20]),
            priorities=rng.random() < 0.5,
        )
        self.assemble(config, sharing)
        self.launched: deque[StepPlan] = deque()
        """steps that have not run"""
        self.ran: deque[tuple[StepPlan, StepResult]] = deque()
        """steps that have, and whose results are still on their way"""
        self.prompts: list[list[int]] = []
        self.count = 0

    def assemble(self, config: SchedulerConfig, sharing: dict[str, bool]) -> None:
        """A scheduler over memory of ``geometry``; with a swap buffer and a tier, where asked for."""
        self.cache = Cache(self.geometry, **sharing)
        self.worker = SymbolicWorker(self.geometry)
        handover = self.join_handover()
        swap = None
        if self.make_swap is not None:
            size = self.geometry.slab_bytes * self.rng.choice([2, 4, 40])
            buffer = replace(self.geometry, arena_bytes=size)
            self.worker.swap = SymbolicWorker(buffer)
            swap = self.make_swap(self.cache, buffer)
        tiers = None if self.make_tiers is None else self.make_tiers(self)
        self.scheduler = Scheduler(self.cache, config, tiers=tiers, swap=swap, handover=handover)

    def join_handover(self) -> HandOver | None:
        return None

    # -- actors -----------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        """Fresh, repeated, or forking from an earlier prompt or conversation."""
        rng = self.rng
        longest = max(1, self.scheduler.config.max_model_len - 2)
        fresh = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 9, 20, 40, 60]))]
        if self.prompts and rng.random() < 0.7:
            base = rng.choice(self.prompts[-20:])
            cut = rng.choice([len(base), rng.randrange(len(base) + 1)])
            fresh = base[:cut] + fresh[: rng.choice([0, 0, 3, 60])]
        return (fresh or [1])[:longest]

    def arrive(self) -> None:
        rng, prompt = self.rng, self.prompt()
        self.prompts.append(prompt)
        self.count += 1
        room = self.scheduler.config.max_model_len - len(prompt)
        ends = frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 2, 8])))
        params = SamplingParams(max_tokens=min(max(1, room), rng.choice(self.answer_lengths)))
        request = Request(
            id=f"r{self.count}", tokens=list(prompt), num_prompt_tokens=len(prompt), params=params, seed=0,
            max_tokens=params.max_tokens, end_token_ids=ends, priority=rng.choice([0, 0, 1, 5]),
            cache_salt=rng.choice(["", "", "other"]),
            tail=rng.choice([None, None, rng.randrange(len(prompt) + 1)]),
            boundaries=tuple(rng.randrange(len(prompt) + 1) for _ in range(rng.choice([0, 0, 2]))),
        )  # fmt: skip
        try:
            self.scheduler.add(request)
        except Refused:
            self.refused += 1
            return
        self.expected[request.id] = self.asked[request.id] = (prompt, params.max_tokens, ends)
        self.answers[request.id] = []

    def cancel(self) -> None:
        if self.scheduler.requests:
            request_id = self.rng.choice(list(self.scheduler.requests))
            assert self.scheduler.cancel(request_id)
            del self.expected[request_id], self.answers[request_id]

    def borrow(self) -> None:
        """The outside actor takes memory and writes it at once, whatever is in flight."""
        kind = Kind.STATE if self.geometry.has_state and self.rng.random() < 0.4 else Kind.PAGE
        unit = self.cache.loans.lend(kind)
        if unit is not None:
            mark = -1000 - self.count
            self.worker.write_unit(unit, mark)
            self.loans.append((unit, mark))

    def end_loan(self) -> None:
        unit, mark = self.loans.pop(self.rng.randrange(len(self.loans)))
        if not self.worker.holds(unit, mark):
            raise Corruption(f"{unit}: a step wrote into memory that was lent")
        self.cache.loans.end(unit)

    # -- time -------------------------------------------------------------------------------

    def launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        assert plan.step == self.steps + 1
        self.steps += 1
        if plan.num_tokens > self.scheduler.config.max_num_batched_tokens:
            raise Corruption(f"{plan.num_tokens} tokens in a step")
        for chunk in plan.chunks:
            prompt, max_tokens, _ = self.asked[chunk.request_id]
            if chunk.end >= len(prompt) + max_tokens:
                raise Corruption(f"{chunk.request_id}: launched beyond its last token")
            self.awaited += chunk.awaited
        self.launched.append(plan)
        return True

    @property
    def in_flight(self) -> int:
        return len(self.launched) + len(self.ran)

    def run_one(self) -> None:
        """The oldest launched step runs now."""
        plan = self.launched.popleft()
        self.ran.append((plan, self.worker.execute(plan)))

    def land(self) -> None:
        """The scheduler learns what the oldest step in flight gave."""
        if not self.ran:
            self.run_one()
        for progress in self.scheduler.update(*self.ran.popleft()):
            got = self.answers[progress.request_id]
            got += progress.tokens
            if progress.finish_reason is not None:
                self.late += progress.request_id in (r.id for r in self.scheduler.queues.leaving)
                self.prompts.append([*self.expected[progress.request_id][0], *got])  # a next turn may follow
                self.compare(progress.request_id, got)

    def compare(self, request_id: str, got: list[int]) -> None:
        prompt, max_tokens, ends = self.expected.pop(request_id)
        del self.answers[request_id]
        self.finished += 1
        if got != answer(prompt, max_tokens, ends):
            raise Corruption(f"{request_id}: the answer differs from a quiet run's")

    def tick(self) -> None:
        rng = self.rng
        if len(self.scheduler.requests) < 30 and rng.random() < 0.25:
            self.arrive()
        if rng.random() < self.cancel_rate:
            self.cancel()
        if rng.random() < 0.05 and len(self.loans) < 3:
            self.borrow()
        if self.loans and rng.random() < 0.2:
            self.end_loan()
        self.advance(rng)
        self.recount(rng, self.check_every)

    def advance(self, rng: random.Random) -> None:
        """A step is launched, runs or lands."""
        self.tick_tier()
        if self.in_flight < self.depth and (not self.in_flight or rng.random() < 0.7):
            self.launch()
        elif self.launched and rng.random() < 0.5:
            self.run_one()
        elif self.in_flight:
            self.land()

    def recount(self, rng: random.Random, every: int) -> None:
        if every and rng.randrange(every) == 0:
            self.scheduler.check()

    def tick_tier(self) -> None:
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.tier.tick()

    def settles(self) -> bool:
        """Whether transfers of a tier are still to come; then they go on."""
        tiers = self.scheduler.tiers
        if tiers is None or not tiers.busy:
            return False
        self.tick_tier()
        tiers.collect()
        tiers.spill()
        return True

    def drain(self) -> None:
        while self.loans:
            self.end_loan()
        for _ in range(20_000):
            self.tick_tier()  # transfers go on while steps do
            if self.in_flight:
                self.land()
            elif self.launch() or self.settles():
                continue
            elif self.scheduler.has_work:
                raise AssertionError("requests wait, memory is free, and nothing is scheduled")
            else:
                break
        self.scheduler.check()
        if self.expected:
            raise AssertionError(f"{len(self.expected)} requests never ended")
        usage = self.cache.usage()
        if usage["pages_used"] or usage["states_used"] or usage["pages_lent"]:
            raise AssertionError(f"memory is held after the last request: {usage}")
