"""How a request went: what metrics and traces tell of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from plait.engine.outputs import CompletionDelta


@dataclass(slots=True)
class Course:
    """From an order to its end. Times are in seconds since the order."""

    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    """of the clock on the wall"""
    queued: float | None = None
    """until the request took part in steps"""
    first: float | None = None
    """until its first token came"""
    last: float = 0.0
    """until its end"""
    tokens: int = 0
    cached: int = 0
    """prompt tokens that came from the prefix cache"""
    reasons: dict[int, str] = field(default_factory=dict)
    """finish reasons, by answer"""
    fault: BaseException | None = None
    """what ended the request instead"""

    def take(self, delta: CompletionDelta) -> None:
        """Something was added."""
        if delta.queued is not None and self.queued is None:
            self.queued = delta.queued
        if delta.token_ids and self.first is None:
            self.first = time.monotonic() - self.began
        self.tokens += len(delta.token_ids)
        self.cached = max(self.cached, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self.reasons[delta.index] = delta.finish_reason

    def end(self) -> None:
        self.last = time.monotonic() - self.began

    @property
    def prefill(self) -> float | None:
        """Seconds in steps until the first token."""
        if self.first is None or self.queued is None:
            return None
        return max(0.0, self.first - self.queued)

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the end."""
        return None if self.first is None else self.last - self.first

    @property
    def inference(self) -> float | None:
        """Seconds in steps."""
        if self.first is None or self.queued is None:
            return None
        return max(0.0, self.last - self.queued)
