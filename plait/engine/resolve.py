"""From what the user set to what holds, with reasons: coupled settings are solved here and nowhere else.

``resolve`` needs the model's config alone and is quick. ``plait.engine.sharing.finish`` shares out the memory
once the weights are there and measures the default token budget. Settings are never changed after that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from plait.config import ConfigError, EngineArgs, check_types
from plait.core.geometry import round_up
from plait.engine.memory import in_words, memory_share, parse_bytes
from plait.kernels.backend import Backend
from plait.kernels.cpu.native import MISSING
from plait.kernels.layout import BLOCK, CacheLayout
from plait.kernels.registry import get_backend
from plait.models.config import DTYPES, ModelConfig
from plait.models.generation import GenerationDefaults, generation_config
from plait.models.gguf import GgufSource
from plait.models.hub import resolve_model
from plait.models.registry import config_from_folder, parse_config
from plait.models.sources import DummySource, SafetensorsSource, WeightSource
from plait.transfer.connect import TransferConfig
from plait.worker.worker import Worker, plan_layout

MOST_THREADS = 1024
_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


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
    async_scheduling: bool = False
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    prompt_tokens_beside_answers: int = 0
    arena_bytes: int = 0
    beside: int = 0
    """bytes of the memory limit that the server's process holds"""
    decisions: tuple[Decision, ...] = field(default=())
    transfer: TransferConfig | None = None

    @property
    def weight_format(self) -> str:
        """How weights are held, in words."""
        if self.args.quantization:
            return f"quantised to {self.args.quantization}"
        if self.backend.keeps_weight_dtype:
            return "at the checkpoint's own width"
        return f"in {dtype_name(self.dtype)}"

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
    check_types(args)
    _refuse_unbuilt(args)
    args, share = _memory_limit(args)
    path = resolve_model(args.model, args.revision, args.download_dir)
    config = model_config(path)
    device = _device(args)
    backend = _backend(args, device)
    dtype, why = _dtype(args, config, device, backend, quantised=path.suffix == ".gguf")
    layout = _layout(args, config, backend, dtype)
    transfer = _transfer(args, device)
    threads = len(os.sched_getaffinity(0)) if args.cpu_threads is None else args.cpu_threads
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"cpu_threads={args.cpu_threads}: it must be from 1 to {MOST_THREADS}")
    kernels = ", ".join(filter(None, (f"{backend.name} {backend.version}", backend.describe())))
    invariant = "answers do not depend on scheduling, bit for bit"
    variant = "float rounding may differ with batch and chunk sizes; answers agree to rounding"
    why_kernels = (invariant if backend.row_invariant else variant) + _not_built(device)
    decisions = [
        Decision("model", line.partition(": ")[0], line.partition(": ")[2])
        for line in config.describe().splitlines()
    ]
    decisions += [
        Decision("device", device, f"{threads} threads" if device == "cpu" else ""),
        Decision("kernels", kernels, why_kernels),
        Decision("dtype", dtype_name(dtype), why),
        *_layout_decisions(layout, args),
        *share,
    ]
    ahead, why_ahead = _async_scheduling(args, device)
    decisions.append(Decision("async scheduling", "on" if ahead else "off", why_ahead))
    if transfer is not None:
        decisions.append(
            Decision("hand-over", f"{transfer.kv_connector}, {transfer.kv_role}", transfer.describe())
        )
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
        async_scheduling=ahead,
        decisions=tuple(decisions),
        transfer=transfer,
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
    resolved.backend.set_threads(resolved.threads)
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
        "tensor_parallel_size": (args.tensor_parallel_size != 1, "set it to 1"),
    }
    for name, (asked, remedy) in not_built.items():
        if asked:
            raise ConfigError(f"{name}={getattr(args, name)!r} is not built yet; {remedy}")
    choices = {
        "load_format": ("auto", "safetensors", "gguf", "dummy"),
        "scheduling_policy": ("fcfs", "priority"),
        "preemption_mode": ("recompute", "swap"),
        "dtype": ("auto", *_ALIASES, *DTYPES),
        "device": ("auto", "cpu", "cuda"),
    }
    for name, known in choices.items():
        value = getattr(args, name)
        if value not in known and not (name == "device" and value.startswith("cuda:")):
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(known)}")
    for name in ("memory_limit", "prefix_cache_budget", "prefix_cache_dir_limit", "swap_limit"):
        if getattr(args, name) is not None:
            try:
                parse_bytes(getattr(args, name))
            except ValueError as fault:
                raise ConfigError(f"{name}: {fault}") from fault
    if not args.enable_prefix_caching:
        for name in ("prefix_cache_budget", "prefix_cache_dir"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name} needs the prefix cache, and it is off; leave out one of the two")
    if args.swap_limit is not None and args.preemption_mode != "swap":
        raise ConfigError("swap_limit has a use with preemption_mode=swap alone; leave out one of the two")
    if args.prefix_cache_dir_limit is not None and args.prefix_cache_dir is None:
        raise ConfigError("prefix_cache_dir_limit needs a prefix_cache_dir; give a folder, or leave it out")
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


def _memory_limit(args: EngineArgs) -> tuple[EngineArgs, list[Decision]]:
    """A share of the machine's memory becomes a limit in bytes."""
    part = args.gpu_memory_utilization
    if part is None:
        return args, []
    if not 0 < part <= 1:
        raise ConfigError(f"gpu_memory_utilization={part}: it must be above 0 and at most 1")
    if args.memory_limit is not None:
        why = "in bytes, as asked: gpu_memory_utilization has no effect beside it"
        return args, [Decision("memory limit", in_words(parse_bytes(args.memory_limit)), why)]
    limit, why = memory_share(part)
    return replace(args, memory_limit=limit), [Decision("memory limit", in_words(limit), why)]


def _transfer(args: EngineArgs, device: str) -> TransferConfig | None:
    if not args.kv_transfer_config:
        return None
    try:
        config = TransferConfig.parse(args.kv_transfer_config)
    except ValueError as fault:
        raise ConfigError(str(fault)) from fault
    if device != "cpu" or not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"kv_transfer_config: the {config.kv_connector} reads arenas in shared memory, on the CPU under "
            f"Linux; this one is on {device}; leave it out"
        )
    return config


def _device(args: EngineArgs) -> str:
    if args.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={args.device!r}: torch finds no CUDA device; use auto or cpu")
    return args.device


def _backend(args: EngineArgs, device: str) -> Backend:
    backend = get_backend("auto", device)
    if args.quantization is None:
        return backend
    try:
        return backend.quantised(args.quantization)
    except ValueError as fault:
        raise ConfigError(f"quantization={args.quantization!r}: {fault}") from fault


def _not_built(device: str) -> str:
    """What a user of the CPU should know who has not got its kernels."""
    if device != "cpu" or MISSING is None:
        return ""
    return f"; the fast kernels are missing: {MISSING}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(
    args: EngineArgs, config: ModelConfig, device: str, backend: Backend, quantised: bool
) -> tuple[torch.dtype, str]:
    if args.dtype != "auto":
        return DTYPES[_ALIASES.get(args.dtype, args.dtype)], "as asked"
    if backend.activation_dtype is not None:
        return backend.activation_dtype, "of activations, with these kernels; weights keep their own"
    if device == "cpu" and config.dtype != torch.float32:
        return torch.float32, f"from {dtype_name(config.dtype)}: faster and exact on a CPU"
    if quantised:
        return config.dtype, "the file's packed weights are dequantised on load"
    return config.dtype, "the checkpoint's"


def _async_scheduling(args: EngineArgs, device: str) -> tuple[bool, str]:
    """Whether the next step is planned while one runs, and why.

    On the CPU the planner takes its time from kernels: from their core, or by Python's lock, which a step
    needs between two of them. Measured (docs/performance.md), this costs as much as it saves, or more.
    """
    if args.async_scheduling is not None:
        return args.async_scheduling, "as asked"
    if device == "cpu":
        return False, "planning beside a step slows its kernels by as much as it saves, on a CPU"
    return False, "not measured on this device; --async-scheduling plans the next step while one runs"


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
    size = BLOCK if args.block_size is None else args.block_size
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
        Decision(
            "page", in_words(layout.page_bytes), f"{per_token:,} bytes per token, {dtype_name(page.dtype)}"
        ),
    ]
    if layout.state is not None:
        ratio = layout.geometry(0, 1).tokens_per_state
        reason = f"{dtype_name(layout.state.dtype)}; as much as {ratio:,} tokens of pages"
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
