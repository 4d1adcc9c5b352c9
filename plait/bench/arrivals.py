"""When sessions begin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A closed loop, or an open one.

    Args:
        rate: sessions per second, in a Poisson process; infinite: all at once. None is the closed loop: the
            next session begins when one of those under way has ended.
        concurrency: sessions under way at most; None: no bound (a closed loop needs one).

    In the open loop a session is due at its arrival, whether or not it must wait for a free place, and its
    latency counts from there: a slow server cannot hide its queue by slowing the client down
    ("coordinated omission").
    """

    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.rate is None and self.concurrency is None:
            raise ValueError("say how sessions arrive: --max-concurrency, --request-rate, or both")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"--request-rate {self.rate:g}: it must be above 0 (inf: all at once)")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"--max-concurrency {self.concurrency}: it must be from 1 up")

    def times(self, count: int, seed: int) -> list[float] | None:
        """Seconds from the start at which each of ``count`` sessions is due; None in the closed loop.

        Gaps are independent and exponential with mean 1 / rate; the first session is due at 0.
        """
        if self.rate is None:
            return None
        if math.isinf(self.rate):
            return [0.0] * count
        gaps = np.random.default_rng([seed, 1]).exponential(1 / self.rate, size=count)
        gaps[:1] = 0.0
        return [float(t) for t in np.cumsum(gaps)]

    def describe(self) -> str:
        bound = "" if self.concurrency is None else f"{self.concurrency} at a time"
        if self.rate is None:
            return f"closed loop, {bound}"
        speed = "all at once" if math.isinf(self.rate) else f"Poisson, {self.rate:g} per second"
        return ", ".join(part for part in (speed, bound and f"at most {bound}") if part)
