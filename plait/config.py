"""What the user may set. ``plait.engine.resolve`` turns it into what holds, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import isfinite
from os import PathLike, fspath
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot hold; the message says what was asked, what holds, and what to do."""


def _setting(default: Any, help: str) -> Any:
    """A field that carries its own help text: the command line and the documentation read it."""
    return field(default=default, metadata={"help": help})


@dataclass(slots=True)
class EngineArgs:
    """Engine settings: keywords of ``LLM(...)`` and flags of ``plait serve`` alike. Names as in vLLM.

    None means that plait decides (and says what it chose and why).
    """

    model: str = ""
    tokenizer: str | None = _setting(None, "Name or folder of the tokenizer; the model's own by default.")
    revision: str | None = _setting(
        None, "Branch, tag or commit of the model on the hub; by default its main one."
    )
    served_model_name: str | None = _setting(
        None, "Name by which clients ask for the model; by default as it was given here."
    )
    dtype: str = _setting("auto", "auto, float32, bfloat16 or float16: of weights and activations.")
    quantization: str | None = _setting(None, "Format the weights are held in; the checkpoint's by default.")
    load_format: str = _setting(
        "auto", "auto, safetensors, gguf or dummy (random weights from the config alone)."
    )
    max_model_len: int | None = _setting(
        None, "Longest prompt plus answer; by default the model's own, as far as memory holds it."
    )
    max_num_batched_tokens: int | None = _setting(
        None,
        "Token budget of a step; by default measured at start, so that a step stays near a second, and near "
        "0.25 s beside running answers.",
    )
    max_num_seqs: int = _setting(256, "Most requests that run at once.")
    long_prefill_token_threshold: int = _setting(
        0, "Most tokens of one prompt in one step; 0: no cap besides the token budget."
    )
    target_itl_ms: float | None = _setting(
        None,
        "Inter-token latency to keep: a step's budget follows measured step times; by default none.",
    )
    enable_prefix_caching: bool = _setting(True, "Reuse pages and snapshots of prompts seen before.")
    enable_chunked_prefill: bool = _setting(True, "Let a prompt span several steps, beside decodes.")
    snapshot_interval: int | None = _setting(
        None,
        "Tokens between spaced snapshots of recurrent state; by default as many as take its memory.",
    )
    prefix_cache_budget: int | str | None = _setting(
        None,
        'Most bytes (or "1GiB") of memory for cached prefixes that no running request holds; all by default.',
    )
    prefix_cache_dir: str | None = _setting(
        None,
        "Folder that keeps pages and snapshots over a restart; engines may share it. By default none.",
    )
    prefix_cache_dir_limit: int | str | None = _setting(
        None,
        'Most bytes (or "20GiB") in prefix_cache_dir; what was used least recently goes. By default half of '
        "what is free there, at most 16GiB.",
    )
    block_size: int | None = _setting(None, "Tokens per page: a multiple of 16, which is the default.")
    kv_cache_dtype: str = _setting("auto", "Format of cached keys and values.")
    mamba_ssm_cache_dtype: str = _setting("auto", "Format of recurrent state.")
    async_scheduling: bool | None = _setting(
        None, "Plan the next step while one runs; by default where that pays."
    )
    preemption_mode: str = _setting("recompute", "How a preempted request resumes: recompute or swap.")
    swap_limit: int | str | None = _setting(
        None,
        'Bytes (or "1GiB") of memory_limit set aside for swapped requests; by default an eighth.',
    )
    scheduling_policy: str = _setting("fcfs", "fcfs (in order of arrival) or priority.")
    seed: int | None = _setting(None, "Seeds requests that bring none; random by default.")
    device: str = _setting("auto", "auto, cpu or cuda.")
    cpu_threads: int | None = _setting(None, "Threads that compute, on the CPU; by default one per core.")
    memory_limit: int | str | None = _setting(
        None,
        'Most bytes (or "2GiB") that plait may hold: weights, cache, and with "plait serve" the server; by '
        "default half of the memory at hand.",
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "The same as a part of the machine's memory, above 0 and at most 1, but not more than other "
        "processes leave; none by default.",
    )
    skip_tokenizer_init: bool = _setting(False, "Token ids in, token ids out: load no tokenizer.")
    chat_template: str | None = _setting(None, "A jinja file or the template itself; the model's by default.")
    trust_remote_code: bool = _setting(
        False, "Refused where it is on: plait runs no code that comes with a model."
    )
    kv_transfer_config: dict[str, Any] | str | None = _setting(  # noqa: RUF009
        None,
        'Hand-over between engines, as JSON such as {"kv_connector": "LoopbackConnector"}; none by default.',
    )
    tensor_parallel_size: int = _setting(
        1, "Processes that share the model by heads; more than 1 is not built yet."
    )
    download_dir: str | None = _setting(
        None, "Where downloaded models are kept; by default in the caches of plait and of the hub."
    )


def check_types(args: EngineArgs) -> None:
    """Refuse settings of the wrong kind before anything is started.

    Raises:
        ConfigError: names the setting and what it takes.
    """
    for spec in fields(args):
        value = getattr(args, spec.name)
        if isinstance(value, PathLike):
            value = fspath(value)
            setattr(args, spec.name, value)
        kinds = {kind.strip().partition("[")[0] for kind in str(spec.type).split("|")}
        given = "None" if value is None else type(value).__name__
        if given not in kinds and not (given == "int" and "float" in kinds):
            raise ConfigError(f"{spec.name}={value!r}: it takes {' or '.join(sorted(kinds))}, not {given}")
        if given == "int" and not -(2**63) <= value < 2**64:
            raise ConfigError(f"{spec.name}={value}: it must fit 64 bits")
        if given == "float" and not isfinite(value):
            raise ConfigError(f"{spec.name}={value}: it must be a finite number")
