"""Timing of calls that take microseconds to seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from plait.kernels.cpu.native import native


def fastest(call: Callable[[], Any], seconds: float, least: int = 3) -> float:
    """Seconds of the fastest of as many calls as fit into ``seconds``, after one that is not counted.

    The fastest, since whatever else runs on the machine can only add time; ceilings are taken the same way.
    """
    call()
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def use_threads(count: int) -> None:
    """Threads that kernels of any kind compute with, from now on in this process."""
    torch.set_num_threads(count)
    if native is not None:
        native.set_threads(count)
