"""Totals since start; each is counted where it happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
