"""Where requests go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.bench.record import Record
from plait.bench.workload import Content


class TargetError(ValueError):
    """The target cannot be measured at all; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; ``role`` is system, user or assistant."""

    role: str
    content: Content


class Clock:
    """Seconds since the run began. Monotonic: changes of the system's time do not touch it."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._zero


class Target(Protocol):
    """Answers requests, and stamps what comes."""

    @property
    def name(self) -> str: ...

    async def ask(
        self, history: Sequence[Message], output_len: int, record: Record, clock: Clock
    ) -> Content | None:
        """Send ``history``, fill ``record`` from ``sent`` on, and return the answer for the next turn.

        A request that fails leaves its reason in ``record.error`` and returns None; nothing is raised.
        """
        ...

    async def prepare(self) -> None:
        """Before each run: forget what an earlier one left in a prefix cache, where that can be asked."""
        ...

    async def close(self) -> None:
        """Give back what the target holds."""
        ...
