"""Two or more targets under the same traffic, interleaved, and the ratios between them.

A machine's speed drifts (heat, neighbours), so runs of one side after runs of the other prove little. Here
every round measures all sides with the same prompts, and each second round in the reverse order of the first
(A B, B A, then anew): a steady drift cancels within two rounds. Ratios are taken within rounds.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.bench.run import Result
from plait.bench.stats import Ratio, paired_ratio

HIGHER_IS_BETTER = ("request_rate", "output_rate", "total_rate", "cached_share")
"""Metrics that are better when they grow; of all others, latencies, less is better."""


def order_of_rounds(sides: int, rounds: int, seed: int) -> list[list[int]]:
    """The order of sides in each round: a random one, its reverse, another random one, and so on."""
    random_order = random.Random(seed)
    orders: list[list[int]] = []
    for number in range(rounds):
        if number % 2 == 0:
            orders.append(random_order.sample(range(sides), sides))
        else:
            orders.append(orders[-1][::-1])
    return orders


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of all sides. ``runs[side][round]``; in the order of the rounds."""

    sides: list[str]
    runs: list[list[Result]]

    def ratios(self, side: int, base: int = 0) -> dict[str, Ratio]:
        """``side`` / ``base`` for every metric that all rounds have, with 95% intervals."""
        before = [run.figures["all"].metrics() for run in self.runs[base]]
        after = [run.figures["all"].metrics() for run in self.runs[side]]
        found = {}
        for name in before[0] if before else ():
            if all(name in metrics for metrics in before + after):
                ratio = paired_ratio([m[name] for m in before], [m[name] for m in after])
                if ratio is not None:
                    found[name] = ratio
        return found

    def verdict(self, name: str, ratio: Ratio) -> str:
        """What a ratio says, in words."""
        if not ratio.differs:
            return "no difference shown"
        return "better" if (ratio.ratio > 1) == (name in HIGHER_IS_BETTER) else "worse"

    def to_dict(self) -> dict[str, Any]:
        ratios = {
            name: {metric: ratio.to_dict() for metric, ratio in self.ratios(side).items()}
            for side, name in enumerate(self.sides)
            if side
        }
        return {
            "base": self.sides[0],
            "ratios": ratios,
            "runs": [
                {"side": side, "round": number, **run.to_dict(with_requests=False)}
                for side, runs in zip(self.sides, self.runs, strict=True)
                for number, run in enumerate(runs)
            ],
        }


async def interleave(
    sides: Sequence[str],
    rounds: int,
    seed: int,
    run: Callable[[int, int], Awaitable[Result]],
    on_run: Callable[[int, int, Result], None] | None = None,
) -> Comparison:
    """Call ``run(side, round)`` for every side in every round, in the order of ``order_of_rounds``."""
    if len(set(sides)) != len(sides):
        raise ValueError(f"the sides to compare must differ, not {', '.join(sides)}")
    results: list[list[Result]] = [[] for _ in sides]
    for number, order in enumerate(order_of_rounds(len(sides), rounds, seed)):
        for side in order:
            result = await run(side, number)
            results[side].append(result)
            if on_run is not None:
                on_run(side, number, result)
    return Comparison(list(sides), results)
