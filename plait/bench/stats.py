"""Percentiles, summaries and intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

PERCENTILES = (50, 90, 95, 99)

_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5% quantiles of Student's t for 1 to 9 degrees of freedom."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of ``ordered`` (ascending, not empty).

    Linear interpolation between the two closest ranks: position ``(n - 1) * percent / 100`` counted from 0
    (type 7 of Hyndman and Fan, 1996; the default of numpy, and what vLLM's benchmark prints).
    """
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, percentiles and extremes of one quantity, in its own unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """None when there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, p) for p in PERCENTILES)
        return cls(len(ordered), fmean(ordered), p50, p90, p95, p99, ordered[-1])

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def student_t(degrees: int) -> float:
    """The 97.5% quantile of Student's t, to 0.0005: a table, then the Cornish-Fisher expansion
    (Abramowitz and Stegun, 26.7.5)."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of paired ratios with its 95% interval."""

    pairs: int
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1."""
        return not self.low <= 1 <= self.high

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def paired_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """The ratio after / before over pairs measured under like conditions.

    With d_i = ln(after_i / before_i), taken to be normal, the ratio is exp(mean d) and its interval
    exp(mean d ± t · s / √n), where t is the 97.5% quantile of Student's t with n - 1 degrees of freedom and
    s the standard deviation of d. A ratio of speeds is skewed; its logarithm much less so, and t allows
    for few pairs, where a bootstrap would give intervals that are too narrow.

    Returns:
        None unless there are two pairs or more, all of them positive.
    """
    if len(before) < 2 or min(*before, *after) <= 0:
        return None
    logs = [math.log(b / a) for a, b in zip(before, after, strict=True)]
    centre = fmean(logs)
    spread = student_t(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(len(logs), math.exp(centre), math.exp(centre - spread), math.exp(centre + spread))
