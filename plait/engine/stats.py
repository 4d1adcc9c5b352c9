"""Numbers of an engine at one moment, and totals since its start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    running: int = 0
    """requests that take part in steps"""
    waiting: int = 0

    pages_total: int = 0
    """the whole arena, in pages"""
    pages_free: int = 0
    pages_cached: int = 0
    pages_used: int = 0
    pages_lent: int = 0
    pages_as_states: int = 0
    """pages' worth of slabs that hold state units"""
    states_used: int = 0
    states_cached: int = 0
    """snapshots"""
    states_lent: int = 0
    arena_bytes: int = 0
    weight_bytes: int = 0
    memory_bytes: int = 0
    """proportional set size of the engine process"""

    steps_total: int = 0
    step_seconds_total: float = 0.0
    idle_seconds_total: float = 0.0
    """from the end of a step to the beginning of the next, where there was something to do"""
    cpu_seconds_total: float = 0.0
    """processor time of the engine process, all threads"""
    prompt_tokens_total: int = 0
    """prompt tokens of requests that were admitted"""
    cached_tokens_total: int = 0
    """of these, found in the prefix cache"""
    computed_tokens_total: int = 0
    recomputed_tokens_total: int = 0
    """of these, computed a second time, after a preemption"""
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    requests_total: dict[str, int] = field(default_factory=dict)
    """ended requests by finish reason"""
    prefix_hits_total: dict[str, int] = field(default_factory=dict)
    """admissions by the kind of snapshot they restored; "page" without recurrent layers, "none" a miss"""
    snapshots_taken_total: dict[str, int] = field(default_factory=dict)
    snapshots_evicted_total: int = 0
    pages_evicted_total: int = 0
    units_moved_total: int = 0
    exports_skipped_total: int = 0
    """snapshots that were wanted but found no memory"""
    swaps_total: dict[str, int] = field(default_factory=dict)
    """preempted requests that were swapped out and in; that found no room; whose shared pages were lost"""
    tier_written_total: dict[str, int] = field(default_factory=dict)
    """pages and snapshots written to prefix_cache_dir"""
    tier_read_total: dict[str, int] = field(default_factory=dict)
    tier_writes_skipped_total: int = 0
    tier_reads_failed_total: int = 0
    copied_bytes_total: dict[str, int] = field(default_factory=dict)
    """bytes that the cache had copied: "snapshot", "restore" or "move" """

    leases: int = 0
    """prompts that were computed here and are kept for other engines"""
    pages_leased: int = 0
    receiving: int = 0
    """requests whose prompt is on its way from another engine"""
    pages_quarantined: int = 0
    """pages of fetches that timed out and are not known to be over; they count as lent"""
    states_quarantined: int = 0
    leases_total: int = 0
    leases_ended_total: dict[str, int] = field(default_factory=dict)
    """by reason: released, expired, lost (its reader died), withdrawn (its client had gone)"""
    prompts_received_total: int = 0
    received_tokens_total: int = 0
    fetches_failed_total: int = 0
    fetches_forgone_total: int = 0
    """requests with a prefilled prompt that needed nothing of it"""
