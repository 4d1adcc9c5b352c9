"""Snapshot policy and eviction on agents' traffic, against simpler ones and against knowing the future."""

from __future__ import annotations

import pytest
from agent_trace import belady, replay, trace, unbounded, working_set

from plait.core.geometry import Geometry


def geometry(ratio, arena_bytes=0):
    """Pages of 16 tokens; a state costs as much as ``ratio`` tokens."""
    page = 16 * 64
    return Geometry(16, page, ratio * 64, 1, arena_bytes)


@pytest.mark.parametrize("ratio", [400, 1570])
def test_a_third_of_the_working_set(ratio):
    turns = trace()
    whole = working_set(turns, geometry(ratio))
    cut = geometry(ratio, whole // 3)
    cached, scheduler = replay(turns, cut)
    plain, _ = replay(turns, cut, plain=True)
    best, bound = belady(turns, cut), unbounded(turns, 16)
    total = sum(len(turn.tokens) for turn in turns)
    figures = {"cached": cached, "tails with LRU": plain, "Belady": best, "endless memory": bound}
    shares = ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in figures.items())
    print(f"\nratio {ratio}: {total:,} prompt tokens; {shares}; {dict(scheduler.cache.counters.hits)}")
    assert cached >= 1.3 * plain


def test_all_of_the_working_set_is_used():
    turns = trace()
    enough = geometry(1570, 4 * working_set(turns, geometry(1570)))
    cached, _ = replay(turns, enough)
    assert cached >= 0.98 * unbounded(turns, 16)
