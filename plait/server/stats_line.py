"""A line now and then about what the engine does; none while it does nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from plait.engine.memory import in_words
from plait.engine.outputs import EngineDeadError
from plait.engine.stats import EngineStats

log = logging.getLogger("plait.stats")


class StatsLine:
    """Rates between two looks at the engine's totals."""

    def __init__(self) -> None:
        self._then: EngineStats | None = None
        self._at = 0.0
        self._hit_rate = 0.0

    def fields(self, now: EngineStats, at: float) -> dict[str, Any] | None:
        """What there is to say at ``at`` (seconds, of any clock); None: nothing has happened since."""
        then, self._then = self._then or EngineStats(), now
        seconds, self._at = at - self._at, at
        generated = now.generation_tokens_total - then.generation_tokens_total
        computed = now.computed_tokens_total - then.computed_tokens_total
        asked = now.prompt_tokens_total - then.prompt_tokens_total
        if asked:
            self._hit_rate = (now.cached_tokens_total - then.cached_tokens_total) / asked
        if not (now.running or now.waiting or generated or computed or asked) or seconds <= 0:
            return None
        pages = now.pages_total or 1
        return {
            # A sampled token is computed in the next step: what else was computed is prompts.
            "prompt_tokens_per_second": round(max(0, computed - generated) / seconds, 1),
            "generation_tokens_per_second": round(generated / seconds, 1),
            "running": now.running,
            "waiting": now.waiting,
            "kv_cache_usage": round(now.pages_used / pages, 4),
            "prefix_cache_hit_rate": round(self._hit_rate, 4),
            "preemptions": now.preemptions_total - then.preemptions_total,
            "memory_bytes": now.memory_bytes,
        }

    def begin(self, now: EngineStats, at: float) -> None:
        """Count from here."""
        self._then, self._at = now, at


def in_one_line(fields: dict[str, Any]) -> str:
    """In the words of vLLM, which log readers may know."""
    text = (
        f"Avg prompt throughput: {fields['prompt_tokens_per_second']:.1f} tokens/s, "
        f"Avg generation throughput: {fields['generation_tokens_per_second']:.1f} tokens/s, "
        f"Running: {fields['running']} reqs, Waiting: {fields['waiting']} reqs, "
        f"KV cache usage: {fields['kv_cache_usage']:.1%}, "
        f"Prefix cache hit rate: {fields['prefix_cache_hit_rate']:.1%}, "
        f"Memory: {in_words(fields['memory_bytes'])}"
    )
    return text + (f", Preempted: {fields['preemptions']} reqs" if fields["preemptions"] else "")


async def log_stats(stats: Callable[[], Awaitable[EngineStats]], seconds: float) -> None:
    """Write the line every so many seconds, until cancelled or until the engine ends."""
    line = StatsLine()
    try:
        line.begin(await stats(), time.monotonic())
        while True:
            await asyncio.sleep(seconds)
            fields = line.fields(await stats(), time.monotonic())
            if fields is not None:
                log.info("%s", in_one_line(fields), extra={"fields": fields})
    except EngineDeadError:
        return  # told elsewhere
