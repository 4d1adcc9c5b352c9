"""Covering arrays: few rows of settings in which every two values of different dimensions meet.

The greedy way of Cohen, Dalal, Fredman and Patton (AETG, 1997): each row begins with a pair that no row has
yet, and takes for one dimension after the other the value that adds most new pairs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

Value = tuple[str, str]
"""(dimension, value)"""
Pair = frozenset[Value]
Excluded = Callable[[Value, Value], str | None]
"""why two values cannot meet, or None; asked in both orders"""

CANDIDATES = 12
"""Rows that are drawn for each row that is kept."""


def _never(a: Value, b: Value) -> None:
    return None


def meet(a: Value, b: Value, excluded: Excluded) -> bool:
    """Whether two values may stand in one row."""
    return excluded(a, b) is None and excluded(b, a) is None


def all_pairs(dimensions: Mapping[str, Sequence[str]], excluded: Excluded = _never) -> set[Pair]:
    """Every pair of values of different dimensions that may meet."""
    found = set()
    for one, other in itertools.combinations(dimensions, 2):
        for a, b in itertools.product(dimensions[one], dimensions[other]):
            if meet((one, a), (other, b), excluded):
                found.add(frozenset([(one, a), (other, b)]))
    return found


def pairs_in(row: Mapping[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covered(rows: Iterable[Mapping[str, str]]) -> set[Pair]:
    return set().union(*map(pairs_in, rows))


def covering_array(
    dimensions: Mapping[str, Sequence[str]],
    *,
    excluded: Excluded = _never,
    at_least: int = 0,
    seed: int = 1,
) -> list[dict[str, str]]:
    """Rows that cover every pair which may meet; the same ones for the same arguments.

    Args:
        dimensions: name -> its values; at least two dimensions.
        excluded: pairs of values that cannot meet.
        at_least: rows in all; those beyond what pairs need are drawn at random, and differ from the others.

    Raises:
        ValueError: a pair that may meet by itself cannot be completed to a row.
    """
    draw = random.Random(seed)
    left = all_pairs(dimensions, excluded)
    rows: list[dict[str, str]] = []
    while left:
        drawn = [_row(dimensions, excluded, left, draw) for _ in range(CANDIDATES)]
        complete = [row for row in drawn if row is not None]
        best = max(complete, key=lambda row: len(pairs_in(row) & left), default=None)
        if best is None:
            raise ValueError(f"{len(left)} pairs fit into no row, among them {sorted(min(left, key=sorted))}")
        rows.append(best)
        left -= pairs_in(best)
    most = 50 * at_least  # there may be fewer different rows than were asked for
    while len(rows) < at_least and most:
        most -= 1
        row = _row(dimensions, excluded, set(), draw)
        if row is not None and row not in rows:
            rows.append(row)
    return rows


def _row(
    dimensions: Mapping[str, Sequence[str]], excluded: Excluded, left: set[Pair], draw: random.Random
) -> dict[str, str] | None:
    """A row around one of the pairs that are left; None where it came to a dead end."""
    row: dict[str, str] = dict(draw.choice(sorted(map(sorted, left)))) if left else {}
    names = [name for name in dimensions if name not in row]
    draw.shuffle(names)
    for name in names:
        fits = [v for v in dimensions[name] if all(meet((name, v), other, excluded) for other in row.items())]
        if not fits:
            return None
        draw.shuffle(fits)
        row[name] = max(fits, key=lambda v: sum(frozenset([(name, v), o]) in left for o in row.items()))
    return {name: row[name] for name in dimensions}
