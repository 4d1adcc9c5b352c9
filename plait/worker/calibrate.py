"""How fast this machine computes: one timed step on scratch memory, before any request."""

from __future__ import annotations

import time

from plait.worker.worker import Worker


def tokens_per_second(worker: Worker, tokens: int) -> float:
    """Prompt tokens per second of one chunk of about ``tokens`` tokens.

    The arena must not be in use: its first units serve as scratch.
    """
    started = time.perf_counter()
    computed = worker.rehearse(tokens)
    return computed / (time.perf_counter() - started)
