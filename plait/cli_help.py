"""How ``--help`` is arranged: flags in groups by what they are about, each with the unit of its value."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from typer.core import TyperGroup, TyperOption

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        "tokenizer", "revision", "served_model_name", "dtype", "quantization", "load_format", "chat_template",
        "skip_tokenizer_init", "trust_remote_code", "download_dir",
    ),
    "Scheduling": (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
        "target_itl_ms", "enable_chunked_prefill", "scheduling_policy", "preemption_mode", "async_scheduling",
        "seed",
    ),
    "Prefix cache": ("enable_prefix_caching", "snapshot_interval", "block_size", "prefix_cache_*"),
    "Memory and device": (
        "memory_limit", "gpu_memory_utilization", "swap_limit", "kv_cache_dtype", "mamba_ssm_cache_dtype",
        "device", "cpu_threads", "tensor_parallel_size",
    ),
    "Between engines": ("kv_transfer_*",),
    "Reasoning and tools": (
        "reasoning_parser", "tool_call_parser", "enable_auto_tool_choice", "default_chat_template_kwargs",
    ),
    "Limits": (
        "max_waiting", "max_body_bytes", "max_prompt_tokens", "stream_interval", "*_timeout",
    ),
    "Security": ("api_key", "ssl_*", "allowed_*", "allow_*"),
    "Logs and figures": ("*log*", "otlp_*", "debug_*"),
}  # fmt: skip
"""Groups by the name of the setting, or a pattern of names; the first that fits. Others stay where they were
declared."""

UNITS: dict[str, tuple[str, ...]] = {
    "TOKENS": (
        "max_model_len", "max_num_batched_tokens", "long_prefill_token_threshold", "snapshot_interval",
        "block_size", "stream_interval", "max_prompt_tokens", "max_tokens", "*_len", "prefix_len",
    ),
    "REQUESTS": ("max_num_seqs", "max_waiting", "max_concurrency", "num_prompts"),
    "MS": ("*_ms",),
    "SECONDS": ("*_timeout", "timeout", "seconds"),
    "BYTES": ("*_bytes", "*_limit", "prefix_cache_budget"),
    "THREADS": ("cpu_threads", "threads"),
    "DIR": ("*_dir",),
    "FILE": ("ssl_*file", "ssl_ca_certs", "output", "html", "result"),
    "JSON": ("*_kwargs", "kv_transfer_config"),
    "URL": ("base_url", "*_endpoint"),
    "NUMBER": (
        "port", "seed", "tensor_parallel_size", "gpu_memory_utilization", "temperature", "top_p", "top_k",
        "api_server_count", "ssl_cert_reqs",
    ),
}  # fmt: skip
"""Units by the name of the setting, or a pattern of names."""


def arrange(command: Any) -> Any:
    """The command itself; each flag of it and of the commands below it is in its group and has its unit."""
    if isinstance(command, TyperGroup):
        for one in command.commands.values():
            arrange(one)
    for option in command.params:
        if not isinstance(option, TyperOption):
            continue
        assert option.name is not None
        if group := _first(GROUPS, option.name):
            option.rich_help_panel = group
        unit = _first(UNITS, option.name)
        if unit and option.metavar is None and not option.is_flag:
            option.metavar = unit
    places = {group: place for place, group in enumerate(GROUPS)}
    command.params.sort(key=lambda param: places.get(getattr(param, "rich_help_panel", None) or "", -1))
    return command


def _first(table: dict[str, tuple[str, ...]], name: str) -> str | None:
    return next((key for key, patterns in table.items() if any(fnmatchcase(name, p) for p in patterns)), None)
