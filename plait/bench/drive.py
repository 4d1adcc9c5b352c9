"""Drives sessions against a target."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from plait.bench.arrivals import Arrivals
from plait.bench.record import Record
from plait.bench.target import Clock, Message, Target
from plait.bench.workload import Session

OnRecord = Callable[[Record], None]


async def drive(
    target: Target,
    sessions: Sequence[Session],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    clock: Clock | None = None,
    on_record: OnRecord | None = None,
) -> list[Record]:
    """Run every session and return one record per request, in the order of their ends.

    A turn is due when the one before it has ended; the first turn of a session when the session is (in the
    closed loop: when its place is free). After a failed turn the rest of its session is given up, and
    recorded as failed.
    """
    run = _Run(target, clock or Clock(), on_record or (lambda record: None))
    times = arrivals.times(len(sessions), seed)
    async with asyncio.TaskGroup() as group:
        if times is None:
            waiting = iter(sessions)
            for _ in range(min(arrivals.concurrency or 1, len(sessions))):
                group.create_task(run.one_after_another(waiting))
        else:
            places = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency else nullcontext()
            for session, due in zip(sessions, times, strict=True):
                group.create_task(run.at(session, due, places))
    return run.records


class _Run:
    def __init__(self, target: Target, clock: Clock, on_record: OnRecord) -> None:
        self.target = target
        self.clock = clock
        self.on_record = on_record
        self.records: list[Record] = []

    async def one_after_another(self, waiting: Any) -> None:
        """A place of the closed loop: takes the next session whenever it is free."""
        for session in waiting:
            await self.session(session, self.clock())

    async def at(self, session: Session, due: float, places: Any) -> None:
        """A session of the open loop. It is late, not forgiven, when it has to wait for a place."""
        await asyncio.sleep(max(0.0, due - self.clock()))
        async with places:
            await self.session(session, due)

    async def session(self, session: Session, due: float) -> None:
        history = [] if session.system is None else [Message("system", session.system)]
        failed: str | None = None
        for number, turn in enumerate(session.turns):
            record = Record(session.label, number, due)
            if failed is None:
                history.append(Message("user", turn.content))
                answer = await self.target.ask(history, turn.output_len, record, self.clock)
                if answer is not None:
                    history.append(Message("assistant", answer))
                failed = record.error
            else:
                record.sent = record.ended = self.clock()
                record.error = f"an earlier turn failed: {failed}"
            self.records.append(record)
            self.on_record(record)
            due = self.clock()
