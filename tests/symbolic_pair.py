"""Two engines over symbolic memory: one computes prompts, the other reads them and answers.

The real schedulers, caches and hand-over logic run on both sides. Between them stands a link that reads the
prefiller's memory and writes the decoder's bit by bit, whenever it likes: steps run in between on both sides,
it breaks off, goes silent beyond all deadlines and then writes after all, and loses leases.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from symbolic import Corruption, SymbolicWorker
from symbolic_world import Driven, World

from plait.core.geometry import Geometry
from plait.core.handover import HandOver, HandOverConfig
from plait.core.limits import Refused, SchedulerConfig
from plait.core.orders import Arrived, Broken, Fetch, Offer, Report, Returned, Source
from plait.core.progress import Progress
from plait.core.swap import SwapSpace
from plait.core.tiers import Tiers


@dataclass
class Job:
    """A fetch under way. ``writes``: what is still to be copied, by place in the order; None: the state."""

    order: Fetch
    offer: Offer | None
    writes: deque[int | None]
    fate: str
    abandoned: bool = False


class Link:
    """The worker's half of one engine; ``peer`` is the other's. Nothing happens but in ``tick``."""

    def __init__(self, worker: SymbolicWorker, rng: random.Random) -> None:
        self.worker = worker
        self.rng = rng
        self.peer: Link = self
        self.table: dict[str, Offer] = {}
        self.jobs: list[Job] = []
        self.reports: list[Report] = []

    # -- orders -----------------------------------------------------------------------------

    def offer(self, offer: Offer) -> None:
        self.table[offer.lease_id] = offer

    def withdraw(self, lease_id: str) -> None:
        del self.table[lease_id]

    def fetch(self, order: Fetch) -> None:
        offer = self.peer.table.get(order.source.lease_id)
        writes: deque[int | None] = deque()
        if offer is not None and offer.digest == order.digest:
            units = [*range(len(order.pages)), *([] if order.state is None else [None])]
            writes.extend(self.rng.sample(units, len(units)))
        elif offer is not None:
            raise Corruption("the prompt of a lease is not the one asked for")
        fate = self.rng.choice(["ends"] * 6 + ["breaks", "silent"])
        self.jobs.append(Job(order, offer, writes, fate))

    def keep(self, sources: list[Source], seconds: float) -> None:
        pass  # leases are lost here whatever anybody asks for

    def abandon(self, fetch_id: int) -> None:
        for job in self.jobs:
            job.abandoned |= job.order.fetch_id == fetch_id

    def release(self, source: Source) -> None:
        if self.peer.table.pop(source.lease_id, None) is not None:
            self.peer.reports.append(Returned(source.lease_id, "released"))

    def poll(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    # -- what happens by itself -------------------------------------------------------------

    def tick(self) -> None:
        rng = self.rng
        if self.table and rng.random() < 0.004:
            lease_id = rng.choice(list(self.table))
            del self.table[lease_id]
            self.reports.append(Returned(lease_id, rng.choice(["expired", "lost"])))
        for job in rng.sample(self.jobs, len(self.jobs)):
            if rng.random() < 0.5:
                self.move(job)

    def move(self, job: Job) -> None:
        """One piece of a fetch, or its end."""
        rng, fetch_id = self.rng, job.order.fetch_id
        if job.fate == "silent" and not job.abandoned:
            return  # until long after its deadline; then it goes on as if nothing had been
        if job.writes:
            if job.fate == "breaks" and rng.random() < 0.3:
                self.end(job, Broken(fetch_id, "the peer broke off"))
            else:
                self.write(job, job.writes.popleft())
        elif job.offer is None:
            self.end(job, Broken(fetch_id, "no such lease"))
        elif rng.random() < (0.1 if job.fate == "silent" else 0.7):
            stands = job.offer.lease_id in self.peer.table
            self.end(job, Arrived(fetch_id) if stands else Broken(fetch_id, "the lease is over"))

    def write(self, job: Job, what: int | None) -> None:
        """Read one unit where it lies now, and write it."""
        assert job.offer is not None
        theirs, ours = self.peer.worker, self.worker
        if what is None:
            assert job.offer.state is not None
            assert job.order.state is not None
            ours.write_state(job.order.state, theirs.states.get(job.offer.state))
        else:
            page = job.offer.pages[job.order.first_page + what]
            ours.write_page(job.order.pages[what], list(theirs.read_page(page)))

    def end(self, job: Job, report: Report) -> None:
        self.jobs.remove(job)
        self.reports.append(report)


class End(World):
    """One of the two engines: of the same model as the other, with a memory of its own size."""

    side = 0
    policy = HandOverConfig(fetch_seconds=25)

    def assemble(self, config: SchedulerConfig, sharing: dict[str, bool]) -> None:
        self.rng = random.Random(self.seed * 2 + self.side)
        g = self.geometry
        slabs = self.rng.choice([8, 14, 30, 90]) * (3 if g.slab_pages == 1 else 1)
        self.geometry = Geometry(g.page_size, g.page_bytes, g.state_bytes, g.state_grid, slabs * g.slab_bytes)
        super().assemble(config, sharing)

    def join_handover(self) -> HandOver:
        self.link = Link(self.worker, self.rng)
        self.now = 0.0
        self.handover = HandOver(self.cache, self.link, self.policy, clock=lambda: self.now)
        return self.handover

    def drain_handover(self) -> tuple[list[Progress], dict[str, str]]:
        return self.scheduler.drain()


class Prefiller(End):
    side = 0


class Decoder(End):
    side = 1


@dataclass
class Pair(Driven):
    """Both engines, their clients and a router, driven by one random seed."""

    seed: int
    depth: int = 1
    policy: HandOverConfig = End.policy
    make_swap: type[SwapSpace] | None = None
    make_tiers: Callable[[World], Tiers] | None = None
    answer_lengths: Sequence[int] = tuple(World.answer_lengths)
    check_every: int = 1
    cancel_rate: float = 0.01
    local_rate: float = 0.2
    """requests that are not handed over"""
    routed: dict[str, object] = field(default_factory=dict)
    """requests at the prefiller that a decoder waits for"""
    failed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        common = {
            "depth": self.depth, "cancel_rate": 0.0, "make_swap": self.make_swap,
            "make_tiers": self.make_tiers,
        }  # fmt: skip
        ends = []
        for kind in (Prefiller, Decoder):
            chosen = {"policy": self.policy, "answer_lengths": list(self.answer_lengths)}
            ends.append(type(kind.__name__, (kind,), chosen)(self.seed, **common))
        self.prefiller, self.decoder = ends
        self.prefiller.link.peer, self.decoder.link.peer = self.decoder.link, self.prefiller.link
        self.seen: set[str] = set()

    # -- clients and the router -------------------------------------------------------------

    def arrive(self) -> None:
        """A request for one of the engines alone, or for both."""
        rng = self.rng
        if rng.random() < self.local_rate:
            rng.choice([self.prefiller, self.decoder]).arrive()
            return
        end = self.prefiller
        known = set(end.scheduler.requests)
        end.arrive()
        for request_id in set(end.scheduler.requests) - known:
            request = end.scheduler.requests[request_id]
            request.leave_at = end.scheduler.leave_at(request.num_prompt_tokens)
            prompt, max_tokens, ends = end.expected.pop(request_id)
            end.answers.pop(request_id)
            self.routed[request_id] = (request, prompt, max_tokens, ends)

    def route(self, progress: Progress) -> None:
        """The prefiller's reply: to the decoder with it."""
        request, prompt, max_tokens, ends = self.routed.pop(progress.request_id)
        offer = progress.offer
        assert offer is not None
        assert not progress.tokens
        if (
            self.rng.random() < 0.03
        ):  # the client has gone; if nobody tells the engine, the lease ends by itself
            if self.rng.random() < 0.5 and offer.lease_id:
                assert self.prefiller.scheduler.cancel(progress.request_id)
            return
        source = Source("prefiller", "here", 1, offer.lease_id, offer.num_tokens)
        twin = type(request)(
            id=f"d{request.id}", tokens=list(prompt), num_prompt_tokens=len(prompt), params=request.params,
            seed=0, max_tokens=max_tokens, end_token_ids=ends, priority=request.priority,
            cache_salt=request.cache_salt, tail=request.tail, boundaries=request.boundaries, source=source,
        )  # fmt: skip
        decoder = self.decoder
        try:
            decoder.scheduler.add(twin)
        except Refused:
            decoder.refused += 1
            return
        decoder.expected[twin.id] = decoder.asked[twin.id] = (prompt, max_tokens, ends)
        decoder.answers[twin.id] = []

    def cancel(self) -> None:
        end = self.rng.choice([self.prefiller, self.decoder])
        request_id = self.rng.choice([*end.scheduler.requests, *self.leased(end)] or [None])
        if request_id is None:
            return
        assert end.scheduler.cancel(request_id)
        if end is self.prefiller:
            self.routed.pop(request_id, None)
        end.expected.pop(request_id, None)
        end.answers.pop(request_id, None)

    def leased(self, end: End) -> list[str]:
        """Prompts that are computed while their client has not been told."""
        return [request.id for request in end.handover.settling]

    # -- time -------------------------------------------------------------------------------

    def step(self, end: End) -> None:
        end.advance(self.rng)
        self.hand_on(end)
        end.recount(self.rng, self.check_every)

    def hand_on(self, end: End) -> None:
        for request in end.handover.receiving.values():
            self.seen.add("partly known" if request.request.nodes else "all fetched")
        if end.scheduler.queues.landed:
            self.seen.add("landed in a queue")
        progress, failed = end.drain_handover()
        for one in progress:
            self.route(one)
        for request_id in failed:
            self.failed += 1
            del end.expected[request_id], end.answers[request_id]

    def tick(self) -> None:
        rng = self.rng
        count = len(self.prefiller.scheduler.requests) + len(self.decoder.scheduler.requests)
        if count < 30 and rng.random() < 0.25:
            self.arrive()
        if rng.random() < self.cancel_rate:
            self.cancel()
        for end in (self.prefiller, self.decoder):
            end.now += 1
            if rng.random() < 0.05 and len(end.loans) < 2:
                end.borrow()
            if end.loans and rng.random() < 0.2:
                end.end_loan()
            if rng.random() < 0.9:
                end.link.tick()
            if rng.random() < 0.8:
                self.step(end)

    @property
    def steps(self) -> int:
        return self.prefiller.steps + self.decoder.steps

    def drain(self) -> None:
        ends = (self.prefiller, self.decoder)
        for end in ends:
            while end.loans:
                end.end_loan()
        for _ in range(50_000):
            for end in ends:
                end.now += 1
                end.link.tick()
                if end.in_flight:
                    end.land()
                elif not end.launch():
                    end.settles()
                self.hand_on(end)
            if not any(self.busy(end) for end in ends):
                break
        else:
            raise AssertionError("requests wait, memory is free, and nothing is scheduled")
        for end in ends:
            end.drain()
            usage = end.cache.usage()
            if usage["states_lent"] or any(end.handover.usage().values()):
                raise AssertionError(f"memory is held after the last request: {usage}")
        if self.routed:
            raise AssertionError(f"{len(self.routed)} prompts were never handed over")

    @staticmethod
    def busy(end: End) -> bool:
        held = any(end.handover.usage().values())
        return bool(held or end.in_flight or end.scheduler.requests or end.link.jobs)
