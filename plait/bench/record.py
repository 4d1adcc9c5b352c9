"""What is kept of one request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """Times in seconds since the run began, on a monotonic clock."""

    label: str
    """the class of its session, such as "short" or "long\""""
    turn: int
    """0 for the first request of a session"""
    scheduled: float
    """when it should have been sent; latencies count from here"""
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """arrival of each piece of the answer that carries tokens"""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """prompt tokens from the prefix cache; None when the server does not say"""
    counted_by: str = "usage"
    """"usage": token counts are the server's; "chunks": one per piece, since the server reports none"""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        """Time to first token: from when the request was due to the first piece of its answer."""
        return (self.chunks[0] if self.chunks else self.ended) - self.scheduled

    @property
    def latency(self) -> float:
        """End-to-end: from when the request was due to the end of its answer."""
        return self.ended - self.scheduled

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: times between pieces. A server that sends several tokens in one piece shows
        fewer and longer gaps, as its reader sees them; ``tpot`` averages over tokens."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last piece - first piece) / (output tokens - 1)."""
        if self.output_tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
