"""Totals since start, of the cache and of the scheduler; each is counted where it happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from plait.core.request import Request


@dataclass(slots=True)
class CacheCounters:
    """Of the cache."""

    hits: Counter[str] = field(default_factory=Counter)
    """admissions by kind of the snapshot they restored ("page": attention alone, "none": no hit)"""
    snapshots_taken: Counter[str] = field(default_factory=Counter)
    snapshots_evicted: int = 0
    pages_evicted: int = 0
    units_moved: int = 0
    exports_skipped: int = 0
    """snapshots that were wanted but found no memory"""
    copied_bytes: Counter[str] = field(default_factory=Counter)
    """bytes written by copying: "snapshot" (states exported), "restore" (what a hit goes on from), "move" """


@dataclass(slots=True)
class SchedulerCounters:
    """Of the scheduler."""

    steps: int = 0
    prompt_tokens: int = 0
    """prompt tokens of requests admitted for the first time"""
    cached_tokens: int = 0
    """of these, found in the cache"""
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    """of these, computed before: by a request that was preempted, and found less in the cache"""
    generated_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def count_admission(self, request: Request) -> None:
        """The request, just admitted, holds what was found of its prompt. Only the first time counts."""
        if request.epoch > 1:
            return
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += request.num_cached_tokens

    def count_end(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
