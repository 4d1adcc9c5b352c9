"""From records to figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from plait.bench.record import Record
from plait.bench.stats import Summary


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one class of requests, or of all.

    Latencies are in seconds. Rates are per second of the run's whole duration, from its start to the last
    end; failed requests count in ``failed`` alone.
    """

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """prompt tokens that came from the prefix cache; None when the server does not report them"""
    token_counts: str
    """who counted the tokens: "usage" (the server), "chunks" (one per streamed piece), or "mixed\""""
    ttft: Summary | None
    """from when a request was due to its first piece"""
    itl: Summary | None
    """between consecutive pieces, over all requests"""
    tpot: Summary | None
    """per request: (last piece - first piece) / (tokens - 1)"""
    e2e: Summary | None
    """from when a request was due to its end"""

    @classmethod
    def of(cls, records: Sequence[Record], duration: float) -> Figures:
        good = [r for r in records if r.ok]
        cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
        counted = {r.counted_by for r in good} or {"usage"}
        return cls(
            duration=duration,
            completed=len(good),
            failed=len(records) - len(good),
            input_tokens=sum(r.prompt_tokens for r in good),
            output_tokens=sum(r.output_tokens for r in good),
            cached_tokens=sum(cached) if good and len(cached) == len(good) else None,
            token_counts=counted.pop() if len(counted) == 1 else "mixed",
            ttft=Summary.of(r.ttft for r in good),
            itl=Summary.of(gap for r in good for gap in r.gaps),
            tpot=Summary.of(t for r in good if (t := r.tpot) is not None),
            e2e=Summary.of(r.latency for r in good),
        )

    @property
    def request_rate(self) -> float:
        """Requests completed per second."""
        return self.completed / self.duration if self.duration else 0.0

    @property
    def input_rate(self) -> float:
        """Prompt tokens per second, those from the cache included."""
        return self.input_tokens / self.duration if self.duration else 0.0

    @property
    def output_rate(self) -> float:
        """Tokens generated per second."""
        return self.output_tokens / self.duration if self.duration else 0.0

    @property
    def total_rate(self) -> float:
        return self.input_rate + self.output_rate

    @property
    def cached_share(self) -> float | None:
        """Part of the prompt tokens that came from the prefix cache."""
        if self.cached_tokens is None or not self.input_tokens:
            return None
        return self.cached_tokens / self.input_tokens

    @property
    def user_speed(self) -> float | None:
        """Tokens per second that the median user sees once the answer has begun: 1 / median TPOT."""
        return 1 / self.tpot.p50 if self.tpot is not None and self.tpot.p50 > 0 else None

    def to_dict(self) -> dict[str, Any]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= {n: v.to_dict() for n, v in given.items() if isinstance(v, Summary)}
        derived = ("request_rate", "input_rate", "output_rate", "total_rate", "cached_share", "user_speed")
        return given | {name: getattr(self, name) for name in derived}

    def metrics(self) -> dict[str, float]:
        """The figures that runs are compared by, those that are known: name to value."""
        found: dict[str, float | None] = {
            "request_rate": self.request_rate,
            "output_rate": self.output_rate,
            "total_rate": self.total_rate,
            "cached_share": self.cached_share,
        }
        for name in ("ttft", "itl", "tpot", "e2e"):
            summary: Summary | None = getattr(self, name)
            for part in ("mean", "p50", "p95", "p99"):
                found[f"{name}_{part}"] = None if summary is None else getattr(summary, part)
        return {name: value for name, value in found.items() if value is not None}


def by_class(records: Sequence[Record], duration: float) -> dict[str, Figures]:
    """Figures of all requests under "all", then of each class, where there is more than one."""
    labels = sorted({r.label for r in records})
    figures = {"all": Figures.of(records, duration)}
    if len(labels) > 1:
        for label in labels:
            figures[label] = Figures.of([r for r in records if r.label == label], duration)
    return figures
