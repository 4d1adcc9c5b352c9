"""How much a step may compute so that running answers keep their pace.

A step's time is modelled as ``a + b * tokens + c * pairs``, where ``pairs`` sums, over the step's
tokens, the tokens each attends to: a late chunk of a long prompt costs more than an early one. The three
coefficients follow measured steps by recursive least squares with forgetting (Haykin, Adaptive Filter
Theory, chapter on RLS).
"""

from __future__ import annotations

FORGET = 0.98
"""Weight of a past step relative to the next one: about 50 steps are remembered."""


def pairs(start: int, count: int) -> int:
    """Token pairs of ``count`` tokens computed from position ``start``."""
    return count * start + count * (count + 1) // 2


class StepTimeModel:
    """Predicts the seconds of a step from its tokens and pairs."""

    # Features are scaled to about 1 for a typical step, so that one prior suits all three.
    SCALE = (1.0, 1e-2, 1e-5)

    def __init__(self) -> None:
        self.samples = 0
        self._weights = [0.0, 0.0, 0.0]
        self._inverse = [[1e3 if i == j else 0.0 for j in range(3)] for i in range(3)]

    def observe(self, tokens: int, token_pairs: int, seconds: float) -> None:
        """Learn from one finished step."""
        x = self._features(tokens, token_pairs)
        px = [sum(row[j] * x[j] for j in range(3)) for row in self._inverse]
        denominator = FORGET + sum(x[i] * px[i] for i in range(3))
        gain = [v / denominator for v in px]
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        self._inverse = [
            [min(1e6, (self._inverse[i][j] - gain[i] * px[j]) / FORGET) for j in range(3)] for i in range(3)
        ]
        self.samples += 1

    def predict(self, tokens: int, token_pairs: int) -> float:
        """Seconds; coefficients that came out negative count as zero."""
        x = self._features(tokens, token_pairs)
        return sum(max(w, 0.0) * v for w, v in zip(self._weights, x, strict=True))

    def _features(self, tokens: int, token_pairs: int) -> tuple[float, float, float]:
        return (self.SCALE[0], self.SCALE[1] * tokens, self.SCALE[2] * token_pairs)


class Pace:
    """Caps a step's prompt tokens so that its time stays within a target.

    Args:
        target_seconds: inter-token latency to keep; None lets the token budget alone decide.
    """

    COLD_TOKENS = 64
    """Most prompt tokens in a step before anything was measured."""
    MIN_SAMPLES = 4

    def __init__(self, target_seconds: float | None = None) -> None:
        self.target = target_seconds
        self.model = StepTimeModel()

    def observe(self, tokens: int, token_pairs: int, seconds: float) -> None:
        if self.target is not None and tokens:
            self.model.observe(tokens, token_pairs, seconds)

    def chunk(self, tokens: int, token_pairs: int, start: int, count: int) -> int:
        """Prompt tokens that fit beside a step's ``tokens`` and ``token_pairs``: 0 to ``count``."""
        if self.target is None:
            return count
        if self.model.samples < self.MIN_SAMPLES:
            return max(0, min(count, self.COLD_TOKENS - tokens))
        low, high = 0, count
        while low < high:  # the predicted time grows with the chunk
            middle = (low + high + 1) // 2
            more = pairs(start, middle)
            if self.model.predict(tokens + middle, token_pairs + more) <= self.target:
                low = middle
            else:
                high = middle - 1
        return low
