"""One measured run: warm-up, traffic, memory, result."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plait import __version__
from plait.bench.arrivals import Arrivals
from plait.bench.drive import drive
from plait.bench.figures import Figures, by_class
from plait.bench.memory import MemoryTrace, watch
from plait.bench.record import Record
from plait.bench.target import Clock, Target, TargetError
from plait.bench.traffic import Traffic

SCHEMA = 1
"""Of the JSON files; it changes whenever a key changes its meaning or goes away."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one run gave. ``duration`` in seconds, from the start to the last end."""

    target: str
    seed: int
    duration: float
    records: list[Record]
    figures: dict[str, Figures]
    memory: MemoryTrace

    def to_dict(self, *, with_requests: bool = True) -> dict[str, Any]:
        result: dict[str, Any] = {
            "target": self.target,
            "seed": self.seed,
            "duration": self.duration,
            "figures": {name: figures.to_dict() for name, figures in self.figures.items()},
            "memory": self.memory.to_dict(),
        }
        if with_requests:
            result["requests"] = [record.to_dict() for record in self.records]
        return result


async def measure(
    target: Target,
    traffic: Traffic,
    *,
    pids: list[int] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Result:
    """Warm up, then drive the traffic; warm-ups are not measured.

    Raises:
        TargetError: no request was answered; says why the first failed.
    """
    _check(target, await drive(target, traffic.warm_up, Arrivals(concurrency=1)))
    await target.prepare()
    clock = Clock()
    async with watch(pids or [], clock) as memory:
        records = await drive(
            target, traffic.sessions, traffic.arrivals, seed=traffic.seed, clock=clock, on_record=on_record
        )
    _check(target, records)
    duration = max((record.ended for record in records), default=0.0)
    return Result(target.name, traffic.seed, duration, records, by_class(records, duration), memory)


def _check(target: Target, records: list[Record]) -> None:
    if records and not any(record.ok for record in records):
        raise TargetError(f"{target.name} answers no request: {records[0].error}")


def machine() -> dict[str, Any]:
    """The machine that the client runs on."""
    name = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": name, "cores": cores, "system": platform.platform()}


def document(kind: str, settings: dict[str, Any], **content: Any) -> dict[str, Any]:
    """The JSON document that every command writes: what was asked, where and when, and the content."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "plait": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        **content,
    }
