"""From what the user set to what holds, with reasons: coupled settings are solved here and nowhere else.

``resolve`` needs the model's config alone and is quick. ``finish`` shares out the memory once the weights
are there and measures the default token budget. Settings are never changed after that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from plait.config import ConfigError, EngineArgs
from plait.core.geometry import Geometry, round_up
from plait.core.snapshots import SnapshotPolicy
from plait.engine.memory import available_bytes, in_words, memory_bytes, parse_bytes
from plait.kernels.backend import Backend
from plait.kernels.layout import BLOCK, CacheLayout
from plait.kernels.registry import get_backend
from plait.models.config import DTYPES, ModelConfig
from plait.models.generation import GenerationDefaults, generation_config
from plait.models.gguf import GgufSource
from plait.models.hub import resolve_model
from plait.models.registry import config_from_folder, parse_config
from plait.models.sources import DummySource, SafetensorsSource, WeightSource
from plait.worker.calibrate import tokens_per_second
from plait.worker.worker import Worker, activation_bytes, plan_layout

DEFAULT_BUDGET = 2048
"""Largest token budget that is chosen by itself."""
SMALLEST_BUDGET = 64
STEP_SECONDS = 1.0
"""The default budget keeps a step under this."""
SHARE = 0.5
"""Part of the memory at hand that the arena takes when no limit is set."""
MARGIN = 64 * 2**20
"""Bytes left for Python and libraries to grow by."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that was chosen, and why."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.reason})" if self.reason else f"{self.name}: {self.value}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings that hold. ``arena_bytes`` is 0 and the budget may be 0 until ``finish``."""

    args: EngineArgs
    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    backend: Backend
    device: str
    dtype: torch.dtype
    layout: CacheLayout
    threads: int
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    arena_bytes: int = 0
    decisions: tuple[Decision, ...] = field(default=())

    @property
    def numerics_id(self) -> str:
        """Everything that changes bits."""
        page, state = self.layout.page, self.layout.state
        parts = [
            f"{self.backend.name} {self.backend.version}",
            f"weights {self.args.quantization or 'as stored'} in {self.dtype}",
            f"kv {page.dtype}",
            f"state {state.dtype if state else None}",
            "tp 1",
        ]
        return "; ".join(parts)


def resolve(args: EngineArgs) -> Resolved:
    """Everything that can be decided from settings and the model's config.

    Raises:
        ConfigError: a setting that cannot hold; says what would.
        ValueError: a model that cannot be found or served.
    """
    _refuse_unbuilt(args)
    path = resolve_model(args.model, args.revision, args.download_dir)
    config = model_config(path)
    device = _device(args)
    backend = get_backend("auto", device)
    dtype, why = _dtype(args, config, device)
    layout = _layout(args, config, backend, dtype)
    threads = args.cpu_threads or len(os.sched_getaffinity(0))
    if threads < 1:
        raise ConfigError(f"cpu_threads={args.cpu_threads}: it must be from 1 up")
    invariant = "answers do not depend on scheduling, bit for bit"
    variant = "float rounding may differ with batch and chunk sizes; answers agree to rounding"
    decisions = [
        Decision("model", line.partition(": ")[0], line.partition(": ")[2])
        for line in config.describe().splitlines()
    ]
    decisions += [
        Decision("device", device, f"{threads} threads" if device == "cpu" else ""),
        Decision(
            "kernels", f"{backend.name} {backend.version}", invariant if backend.row_invariant else variant
        ),
        Decision("dtype", _name(dtype), why),
        *_layout_decisions(layout, args),
    ]
    resolved = Resolved(
        args=args,
        path=path,
        config=config,
        generation=generation_config(path),
        backend=backend,
        device=device,
        dtype=dtype,
        layout=layout,
        threads=threads,
        decisions=tuple(decisions),
    )
    return _resolve_lengths(resolved)


def model_config(path: Path) -> ModelConfig:
    return parse_config(GgufSource(path).config) if path.suffix == ".gguf" else config_from_folder(path)


def weight_source(resolved: Resolved) -> WeightSource | DummySource:
    if resolved.args.load_format == "dummy":
        return DummySource(resolved.config, seed=resolved.args.seed or 0)
    return GgufSource(resolved.path) if resolved.path.suffix == ".gguf" else SafetensorsSource(resolved.path)


def load_worker(resolved: Resolved, progress: Any = None) -> Worker:
    """Read and pack the weights."""
    torch.set_num_threads(resolved.threads)
    return Worker.load(
        resolved.config,
        weight_source(resolved),
        dtype=resolved.dtype,
        layout=resolved.layout,
        device=resolved.device,
        backend=resolved.backend,
        progress=progress,
    )


# -- single settings ----------------------------------------------------------------------------


def _refuse_unbuilt(args: EngineArgs) -> None:
    """Settings that have a name already and no machinery yet: refused, never ignored."""
    not_built = {
        "quantization": (args.quantization is not None, "leave it out; weights are held as dtype says"),
        "async_scheduling": (bool(args.async_scheduling), "leave it out or set it to False"),
        "preemption_mode": (args.preemption_mode != "recompute", 'set it to "recompute"'),
        "tensor_parallel_size": (args.tensor_parallel_size != 1, "set it to 1"),
    }
    for name, (asked, remedy) in not_built.items():
        if asked:
            raise ConfigError(f"{name}={getattr(args, name)!r} is not built yet; {remedy}")
    choices = {
        "load_format": ("auto", "safetensors", "gguf", "dummy"),
        "scheduling_policy": ("fcfs", "priority"),
        "dtype": ("auto", "half", *DTYPES),
        "device": ("auto", "cpu", "cuda"),
    }
    for name, known in choices.items():
        value = getattr(args, name)
        if value not in known and not (name == "device" and value.startswith("cuda:")):
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(known)}")
    if args.trust_remote_code:
        raise ConfigError("trust_remote_code: plait runs no code that comes with a model; leave it out")
    if args.max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs={args.max_num_seqs}: it must be from 1 up")
    if args.long_prefill_token_threshold < 0:
        raise ConfigError(
            f"long_prefill_token_threshold={args.long_prefill_token_threshold}: 0 (no cap) or more"
        )
    if args.target_itl_ms is not None and args.target_itl_ms <= 0:
        raise ConfigError(f"target_itl_ms={args.target_itl_ms}: it must be above 0")
    if args.target_itl_ms is not None and not args.enable_chunked_prefill:
        raise ConfigError("target_itl_ms needs chunked prefill; leave out one of the two")
    if args.snapshot_interval is not None and args.snapshot_interval < 1:
        raise ConfigError(f"snapshot_interval={args.snapshot_interval}: it must be from 1 up")


def _device(args: EngineArgs) -> str:
    if args.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={args.device!r}: torch finds no CUDA device; use auto or cpu")
    return args.device


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(args: EngineArgs, config: ModelConfig, device: str) -> tuple[torch.dtype, str]:
    if args.dtype != "auto":
        return DTYPES["float16" if args.dtype == "half" else args.dtype], "as asked"
    if device == "cpu" and config.dtype != torch.float32:
        return torch.float32, f"from {_name(config.dtype)}: faster and exact on a CPU"
    return config.dtype, "the checkpoint's"


def _cache_dtype(args: EngineArgs, name: str) -> torch.dtype | None:
    known = {
        **DTYPES,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "int8": torch.int8,
    }
    value = getattr(args, name)
    if value == "auto":
        return None
    if value not in known:
        raise ConfigError(f"{name}={value!r}: choose one of auto, {', '.join(known)}")
    return known[value]


def _layout(args: EngineArgs, config: ModelConfig, backend: Backend, dtype: torch.dtype) -> CacheLayout:
    size = args.block_size or BLOCK
    if size < BLOCK or size % BLOCK:
        nearest = max(BLOCK, round_up(size, BLOCK))
        raise ConfigError(f"block_size={size}: pages hold a multiple of {BLOCK} tokens; {nearest} works")
    kv_dtype = _cache_dtype(args, "kv_cache_dtype") or dtype
    state_dtype = _cache_dtype(args, "mamba_ssm_cache_dtype") or config.state_dtype
    for name, kwargs in (
        ("dtype", {"dtype": dtype}),
        ("kv_cache_dtype", {"kv_dtype": kv_dtype}),
        ("mamba_ssm_cache_dtype", {"state_dtype": state_dtype}),
        ("block_size", {"page_size": size}),
    ):
        reason = backend.supports(**kwargs)
        if reason:
            raise ConfigError(f"{name}={getattr(args, name)!r}: {reason}")
    return plan_layout(config, page_size=size, dtype=dtype, kv_dtype=kv_dtype, state_dtype=state_dtype)


def _layout_decisions(layout: CacheLayout, args: EngineArgs) -> list[Decision]:
    page = layout.page
    per_token = layout.page_bytes // layout.page_size
    asked = "as asked" if args.block_size else "the smallest: prefixes are shared to the page"
    decisions = [
        Decision("block_size", f"{layout.page_size} tokens", asked),
        Decision("page", in_words(layout.page_bytes), f"{per_token:,} bytes per token, {_name(page.dtype)}"),
    ]
    if layout.state is not None:
        ratio = layout.geometry(0, 1).tokens_per_state
        reason = f"{_name(layout.state.dtype)}; as much as {ratio:,} tokens of pages"
        decisions.append(Decision("state", in_words(layout.state_bytes), reason))
    return decisions


def _resolve_lengths(resolved: Resolved) -> Resolved:
    """max_model_len and the token budget, as far as they do not depend on memory and speed."""
    args, config, grid = resolved.args, resolved.config, resolved.backend.state_grid
    longest = config.max_position_embeddings
    asked = args.max_model_len
    if asked is not None and not 1 < asked <= longest:
        raise ConfigError(f"max_model_len={asked}: this model takes 2 to {longest} tokens")
    budget = args.max_num_batched_tokens
    if budget is not None and budget < grid:
        raise ConfigError(
            f"max_num_batched_tokens={budget}: chunks end at multiples of {grid} with these kernels; "
            f"the nearest value that works is {grid}"
        )
    return replace(resolved, max_model_len=asked or longest, max_num_batched_tokens=budget or 0)


# -- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of the engine process is shared out, in bytes."""

    limit: int | None
    held: int
    """by Python, libraries and weights"""
    workspace: int
    """temporaries of the largest step"""
    arena: int

    def arithmetic(self) -> str:
        whole = "" if self.limit is None else f"{in_words(self.limit)} limit: "
        return (
            f"{whole}{in_words(self.held)} program and weights + {in_words(self.workspace)} for a step "
            f"+ {in_words(max(self.arena, 0))} arena"
        )


def share_memory(resolved: Resolved, held: int) -> MemoryPlan:
    """The arena takes what the limit leaves (without one, a share of what the machine has to give)."""
    args, config = resolved.args, resolved.config
    limit = None if args.memory_limit is None else parse_bytes(args.memory_limit)
    tokens = resolved.max_num_batched_tokens or DEFAULT_BUDGET
    if not args.enable_chunked_prefill:
        tokens = max(tokens, resolved.max_model_len)
    rows = min(args.max_num_seqs, tokens)
    workspace = activation_bytes(config, tokens=tokens, logit_rows=rows, dtype=resolved.dtype) + MARGIN
    if limit is not None:
        return MemoryPlan(limit, held, workspace, limit - held - workspace)
    available = available_bytes()
    if available is None:
        return MemoryPlan(None, held, workspace, 4 * 2**30)
    useful = _useful_arena(resolved)
    return MemoryPlan(None, held, workspace, min(int((available - workspace) * SHARE), useful))


def _useful_arena(resolved: Resolved) -> int:
    """Bytes beyond which the arena would serve nobody: every running request at full length, twice."""
    geometry = resolved.layout.geometry(0, resolved.backend.state_grid)
    return 2 * resolved.args.max_num_seqs * geometry.slabs_for(resolved.max_model_len) * geometry.slab_bytes


def _fit(resolved: Resolved, plan: MemoryPlan) -> tuple[Geometry, int]:
    """The geometry, and the longest request it can hold.

    Raises:
        ConfigError: nothing fits, or not what was asked; with the arithmetic.
    """
    geometry = resolved.layout.geometry(max(plan.arena, 0), resolved.backend.state_grid)
    longest = geometry.longest_request()
    asked = resolved.args.max_model_len
    least = asked or 2
    if longest < least:
        needed = geometry.slabs_for(least) * geometry.slab_bytes
        missing = needed - max(plan.arena, 0)
        advice = f"raise memory_limit by {in_words(missing)}" if plan.limit else "free some memory"
        if asked and longest >= 2:
            advice += f", or set max_model_len to {longest} or less"
        raise ConfigError(
            f"one request of {least} tokens needs {in_words(needed)} of arena ({plan.arithmetic()}); {advice}"
        )
    return geometry, min(longest, resolved.max_model_len)


def sequences_that_fit(geometry: Geometry, tokens: int) -> int:
    """Requests of ``tokens`` tokens each that fit into the arena together."""
    low, high = 0, geometry.num_slabs * max(geometry.slab_pages, geometry.slab_states)
    pages = geometry.pages_for(tokens)
    while low < high:
        count = (low + high + 1) // 2
        slabs = -(-count * pages // geometry.slab_pages)
        slabs += -(-count // geometry.slab_states) if geometry.has_state else 0
        if slabs <= geometry.num_slabs:
            low = count
        else:
            high = count - 1
    return low


def _memory_decisions(resolved: Resolved, plan: MemoryPlan, geometry: Geometry) -> list[Decision]:
    args = resolved.args
    short, full = (sequences_that_fit(geometry, n) for n in (geometry.page_size, resolved.max_model_len))
    seqs = f"{min(short, args.max_num_seqs)} run at once at most"
    if short < args.max_num_seqs:
        each = "a state and a page" if geometry.has_state else "a page"
        why = f"{args.max_num_seqs} asked, but memory holds {each} for {short}; the others wait"
    else:
        why = f"memory holds {short} of one page, {full} of {resolved.max_model_len:,} tokens"
    shorter = resolved.max_model_len < (args.max_model_len or resolved.config.max_position_embeddings)
    decisions = [
        Decision("memory", in_words(geometry.num_slabs * geometry.slab_bytes) + " arena", plan.arithmetic()),
        Decision(
            "max_model_len",
            f"{resolved.max_model_len:,} tokens",
            "what the arena holds" if shorter else "as asked" if args.max_model_len else "the model's",
        ),
        Decision("max_num_seqs", seqs, why),
    ]
    decisions.append(_cache_decision(resolved, geometry))
    return decisions


def _cache_decision(resolved: Resolved, geometry: Geometry) -> Decision:
    if not resolved.args.enable_prefix_caching:
        return Decision("prefix cache", "off", "as asked")
    if not geometry.has_state:
        return Decision("prefix cache", "on", f"to the page of {geometry.page_size} tokens")
    policy = SnapshotPolicy.of(geometry, resolved.args.snapshot_interval)
    return Decision(
        "prefix cache",
        "on",
        f"snapshots at the end of prompts, at forks and every {policy.interval:,} tokens, "
        f"at multiples of {policy.grid}",
    )


# -- once the weights are there -----------------------------------------------------------------


def finish(resolved: Resolved, worker: Worker) -> Resolved:
    """Share out memory, allocate the arena, and measure the default budget.

    Raises:
        ConfigError: not even one request fits; with the arithmetic.
    """
    plan = share_memory(resolved, memory_bytes())
    geometry, longest = _fit(resolved, plan)
    resolved = replace(resolved, max_model_len=longest)
    worker.allocate(geometry.num_slabs * geometry.slab_bytes)
    budget, why = _budget(resolved, worker)
    decisions = [
        *_memory_decisions(resolved, plan, geometry),
        Decision("max_num_batched_tokens", f"{budget} tokens", why),
    ]
    return replace(
        resolved,
        arena_bytes=geometry.num_slabs * geometry.slab_bytes,
        max_num_batched_tokens=budget,
        decisions=(*resolved.decisions, *decisions),
    )


def _budget(resolved: Resolved, worker: Worker) -> tuple[int, str]:
    """The token budget and its reason."""
    args, grid = resolved.args, resolved.backend.state_grid
    budget, why = resolved.max_num_batched_tokens, "as asked"
    if not budget and resolved.device == "cpu":
        speed = _measure(worker)
        budget = int(min(max(speed * STEP_SECONDS, SMALLEST_BUDGET), DEFAULT_BUDGET))
        budget = max(budget // SMALLEST_BUDGET * SMALLEST_BUDGET, grid)
        why = f"measured {speed:,.0f} tokens/s: a step stays near {STEP_SECONDS:.0f} s"
    elif not budget:
        budget, why = max(DEFAULT_BUDGET, grid), "the default"
    if not args.enable_chunked_prefill:
        whole = resolved.max_model_len + args.max_num_seqs
        if budget < whole:
            budget, why = whole, f"raised from {budget}: without chunked prefill a prompt runs whole"
    return budget, why


def _measure(worker: Worker) -> float:
    """Prompt tokens per second of a short prompt, after a warm-up."""
    tokens_per_second(worker, 16)
    return tokens_per_second(worker, 64)


# -- plait explain ------------------------------------------------------------------------------


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
    geometry, longest = _fit(resolved, plan)
    resolved = replace(resolved, max_model_len=longest)
    budget = resolved.max_num_batched_tokens
    value = f"{budget} tokens" if budget else "measured at start"
    why = "as asked" if budget else f"a step shall stay near {STEP_SECONDS:.0f} s"
    slab = f"{geometry.slab_pages} pages"
    if geometry.has_state:
        slab += f" or {geometry.slab_states} states"
    memory = [
        Decision("weights", in_words(weights), f"in {_name(resolved.dtype)}"),
        *_memory_decisions(resolved, plan, geometry),
        Decision("slab", in_words(geometry.slab_bytes), slab),
        Decision("slabs", f"{geometry.num_slabs:,}", "each holds pages or states, as need be"),
        Decision("max_num_batched_tokens", value, why),
    ]
    return Explanation([("model", list(resolved.decisions)), ("memory", memory)])


def estimate_weight_bytes(resolved: Resolved) -> int:
    """Bytes of the weights in the dtype they will be held in, from the files' headers."""
    source = weight_source(resolved)
    if isinstance(source, DummySource):
        return 0
    skipped = ("mtp.", "model.visual.", "visual.")
    shapes = [source.shape(name) for name in source.names() if not name.startswith(skipped)]
    return sum(torch.Size(shape).numel() for shape in shapes) * resolved.dtype.itemsize
