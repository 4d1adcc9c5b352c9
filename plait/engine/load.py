"""From settings to an engine that can step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from plait.config import EngineArgs
from plait.engine.core import EngineCore
from plait.engine.memory import memory_bytes
from plait.engine.resolve import load_worker, resolve

PROGRESS_SECONDS = 0.5
"""Between two reports of progress."""


def load_engine(args: EngineArgs, stage: Callable[[str], None], beside: Sequence[int] = ()) -> EngineCore:
    """Resolve, load the weights, allocate memory, measure.

    Args:
        stage: told what is going on.
        beside: ids of processes that ``memory_limit`` bounds together with this one.

    Raises:
        ConfigError, ValueError: settings or a model that cannot be served.
    """
    stage("reading the model's config")
    resolved = resolve(args)
    stage(f"loading weights from {resolved.path.name}")
    worker = load_worker(resolved, _reporter(stage))
    resolved = replace(resolved, beside=sum(map(memory_bytes, beside)))
    stage("allocating memory and measuring")
    return EngineCore.start(resolved, worker)


def _reporter(stage: Callable[[str], None]) -> Callable[[int, int], None]:
    """Turns the count of tensors into stages, at a pace a person can read."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last = now
            stage(f"loading weights: {done} of {total} tensors")

    return report
