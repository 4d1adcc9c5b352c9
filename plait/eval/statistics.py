"""What counts of right answers say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""The 97.5th percentile of the normal distribution."""


def wilson(right: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a share (Wilson 1927): 95% unless ``z`` says otherwise.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if count < 1 or not 0 <= right <= count:
        raise ValueError(f"{right} of {count} is no share")
    share, squared = right / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z * math.sqrt(share * (1 - share) / count + squared / (4 * count * count)) / (1 + squared / count)
    # At the ends the exact bound is the end itself.
    low = 0.0 if right == 0 else max(0.0, middle - half)
    high = 1.0 if right == count else min(1.0, middle + half)
    return low, high


@dataclass(frozen=True, slots=True)
class Paired:
    """Two configurations on the same questions.

    Args:
        count: questions.
        first_only, second_only: questions that one got right and the other did not.
    """

    count: int
    first_only: int
    second_only: int

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> Paired:
        pairs = list(zip(first, second, strict=True))
        return cls(len(pairs), sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))

    @property
    def difference(self) -> float:
        """Accuracy of the second less that of the first."""
        return (self.second_only - self.first_only) / self.count if self.count else 0.0

    @property
    def p(self) -> float:
        """McNemar's exact test, two-sided: how likely a split at least as uneven of the questions in which
        the two differ would be, were both equally good."""
        differing = self.first_only + self.second_only
        fewer = min(self.first_only, self.second_only)
        tail = ways = 1  # of choosing i among them, summed over i up to the fewer
        for i in range(fewer):
            ways = ways * (differing - i) // (i + 1)
            tail += ways
        # Whole numbers, so that no power of two is too large for a float.
        return min(1.0, (2 * tail) / (1 << differing))
