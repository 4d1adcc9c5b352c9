"""Memory of a process and its descendants over time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.bench.target import Clock

_PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """``pid`` and its descendants; empty when there is no such process (or no /proc)."""
    if not (_PROC / str(pid)).is_dir():
        return []
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # "pid (name) state ppid ...": a name may hold spaces and brackets.
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree, reached = [], [pid]
    while reached:
        tree.append(reached.pop())
        reached += children.get(tree[-1], ())
    return tree


def pss_bytes(pids: Iterable[int]) -> int:
    """Sum of proportional set sizes: memory shared by several processes counts in parts. 0 for those gone."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


@dataclass(slots=True)
class MemoryTrace:
    """PSS of process trees, sampled during a run."""

    pids: list[int]
    seconds: list[float] = field(default_factory=list)
    pss_bytes: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int | None:
        return max(self.pss_bytes, default=None)

    def sample(self, clock: Clock) -> None:
        """Note what the trees hold now. The system walks page tables for it: milliseconds per GiB."""
        pids = {p for pid in self.pids for p in process_tree(pid)}
        if pids:
            self.seconds.append(clock())
            self.pss_bytes.append(pss_bytes(pids))

    def to_dict(self) -> dict[str, Any]:
        return {"pids": self.pids, "seconds": self.seconds, "pss_bytes": self.pss_bytes, "peak": self.peak}


@asynccontextmanager
async def watch(pids: list[int], clock: Clock, every: float = 1.0) -> AsyncIterator[MemoryTrace]:
    """Sample the trees at once, every ``every`` seconds, and at the end."""
    trace = MemoryTrace(pids)

    async def sampling() -> None:
        while True:
            await asyncio.to_thread(trace.sample, clock)
            await asyncio.sleep(every)

    task = asyncio.create_task(sampling()) if pids else None
    try:
        yield trace
    finally:
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            trace.sample(clock)
