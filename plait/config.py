"""What the user may set. ``plait.engine.resolve`` turns it into what holds, with reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineArgs:
    """Engine settings: keywords of ``LLM(...)`` and flags of ``plait serve`` alike. Names as in vLLM.

    None means that plait decides (and says what it chose and why).
    """

    model: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16: of weights and activations"""
    quantization: str | None = None
    load_format: str = "auto"
    """auto, safetensors, gguf or dummy (random weights from the config alone)"""
    max_model_len: int | None = None
    """longest prompt plus answer, in tokens"""
    max_num_batched_tokens: int | None = None
    """token budget of a step"""
    max_num_seqs: int = 256
    """most requests that run at once"""
    long_prefill_token_threshold: int = 0
    """most tokens of one prompt in one step; 0: no cap besides the token budget"""
    target_itl_ms: float | None = None
    """inter-token latency to keep: the budget of each step follows measured step times"""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    snapshot_interval: int | None = None
    """tokens between spaced snapshots of recurrent state"""
    block_size: int | None = None
    """tokens per page; a multiple of 16"""
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    async_scheduling: bool | None = None
    preemption_mode: str = "recompute"
    scheduling_policy: str = "fcfs"
    """fcfs or priority"""
    seed: int | None = None
    """seeds requests that bring none; None draws at random"""
    device: str = "auto"
    cpu_threads: int | None = None
    memory_limit: int | str | None = None
    """bytes (or "2GiB") that the engine process may hold, weights included"""
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    """a jinja file, or the template itself; None: the model's own"""
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    download_dir: str | None = None
