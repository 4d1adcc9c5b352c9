"""What ``plait serve`` would choose, and why, without loading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from plait.config import EngineArgs
from plait.engine.memory import in_words, memory_bytes
from plait.engine.resolve import Decision, Resolved, resolve, weight_source
from plait.engine.sharing import BESIDE_SECONDS, STEP_SECONDS, fit, memory_decisions, share_memory
from plait.models.sources import DummySource
from plait.models.weights import SKIPPED_PREFIXES


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be chosen, without loading weights."""

    sections: list[tuple[str, list[Decision]]]

    def to_dict(self) -> dict[str, Any]:
        return {
            title: [{"name": d.name, "value": d.value, "reason": d.reason} for d in rows]
            for title, rows in self.sections
        }


def explain(args: EngineArgs) -> Explanation:
    """What ``plait serve`` would choose for these settings, and why.

    Raises:
        ConfigError, ValueError: as ``resolve``.
    """
    resolved = resolve(args)
    weights = estimate_weight_bytes(resolved)
    plan = share_memory(resolved, memory_bytes() + weights)
    geometry, longest = fit(resolved, plan)
    resolved = replace(resolved, max_model_len=longest)
    budget = resolved.max_num_batched_tokens
    value = f"{budget} tokens" if budget else "measured at start"
    near = f"a step shall stay near {STEP_SECONDS:.0f} s, beside running answers near {BESIDE_SECONDS:.2f} s"
    why = "as asked" if budget else near
    slab = f"{geometry.slab_pages} pages"
    if geometry.has_state:
        slab += f" or {geometry.slab_states} states"
    memory = [
        Decision("weights", in_words(weights), resolved.weight_format),
        *memory_decisions(resolved, plan, geometry),
        Decision("slab", in_words(geometry.slab_bytes), slab),
        Decision("slabs", f"{geometry.num_slabs:,}", "each holds pages or states, as need be"),
        Decision("max_num_batched_tokens", value, why),
    ]
    if args.prefix_cache_dir is not None:
        memory.append(Decision("prefix cache on disk", args.prefix_cache_dir, "looked at when plait starts"))
    return Explanation([("model", list(resolved.decisions)), ("memory", memory)])


def estimate_weight_bytes(resolved: Resolved) -> int:
    """Bytes of the weights as they will be held, from the files' headers."""
    source, backend = weight_source(resolved), resolved.backend
    if isinstance(source, DummySource):
        return 0
    total = 0
    for name in source.names():
        if name.startswith(SKIPPED_PREFIXES):
            continue
        shape = source.shape(name)
        if backend.keeps_weight_dtype:
            total += backend.packed_bytes(shape, source.nbytes(name, backend.block_formats))
        else:
            total += math.prod(shape) * resolved.dtype.itemsize
    return total
