"""Settings of vLLM that plait decides itself, or does not have.

Whoever comes from vLLM brings these along. One that plait has no need of is accepted, with a line
that says what plait does instead; one that would change the answer or the machine is refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting of vLLM: what plait says when it is given."""

    says: str
    takes_value: bool = True
    accepts: tuple[str, ...] | None = None
    """values that change nothing and are accepted; None: any value"""


_LAUNCH = "plait chooses how steps are launched; answers do not depend on it"
_MEMORY = "plait takes half of the memory at hand, or keeps to memory_limit, in bytes, weights included"
_STATES = "states are published at page boundaries and kept at few positions; see snapshot_interval"
_TEXT_ONLY = "plait loads the language model alone"
_LOGS = "only plait serve writes such lines"
_ONE = ("1",)
_OFF = ("false", "none", "0", "")

FOREIGN: dict[str, Foreign] = {
    # accepted: plait decides
    "kv_cache_memory_bytes": Foreign(_MEMORY),
    "num_gpu_blocks_override": Foreign(_MEMORY),
    "swap_space": Foreign("see preemption_mode=swap and swap_limit, which counts bytes inside memory_limit"),
    "enforce_eager": Foreign(_LAUNCH, takes_value=False),
    "max_cudagraph_capture_size": Foreign(_LAUNCH),
    "cudagraph_capture_sizes": Foreign(_LAUNCH),
    "max_seq_len_to_capture": Foreign(_LAUNCH),
    "compilation_config": Foreign(_LAUNCH),
    "optimization_level": Foreign(_LAUNCH),
    "gdn_prefill_backend": Foreign("the kernels of recurrent layers follow from the device"),
    "attention_backend": Foreign("the kernels of attention layers follow from the device"),
    "mamba_backend": Foreign("the kernels of recurrent layers follow from the device"),
    "mamba_cache_mode": Foreign(_STATES),
    "mamba_block_size": Foreign(_STATES),
    "mamba_cache_dtype": Foreign("the conv state keeps the dtype of activations; see mamba_ssm_cache_dtype"),
    "calculate_kv_scales": Foreign(
        "scales come from the checkpoint, else one per token and head; nothing is calibrated on traffic",
        takes_value=False,
    ),
    "language_model_only": Foreign(_TEXT_ONLY, takes_value=False),
    "skip_mm_profiling": Foreign(_TEXT_ONLY, takes_value=False),
    "limit_mm_per_prompt": Foreign(_TEXT_ONLY),
    "mm_processor_kwargs": Foreign(_TEXT_ONLY),
    "mm_processor_cache_gb": Foreign(_TEXT_ONLY),
    "disable_hybrid_kv_cache_manager": Foreign(
        "pages, slots and snapshots share one arena; no manager can be turned off", takes_value=False
    ),
    "prefix_caching_hash_algo": Foreign("tokens are compared after the hash, whatever the hash"),
    "max_num_partial_prefills": Foreign("a step takes chunks of as many prompts as its budget holds"),
    "max_long_partial_prefills": Foreign("a step takes chunks of as many prompts as its budget holds"),
    "disable_custom_all_reduce": Foreign("ranks are summed in a fixed order", takes_value=False),
    "distributed_executor_backend": Foreign("plait starts its own processes"),
    "disable_frontend_multiprocessing": Foreign(
        "the engine always runs in its own process", takes_value=False
    ),
    "disable_log_stats": Foreign(_LOGS, takes_value=False),
    "disable_log_requests": Foreign(_LOGS, takes_value=False),
    "enable_log_requests": Foreign(_LOGS, takes_value=False),
    "max_logprobs": Foreign("up to 64 alternatives per position are served"),
    "tokenizer_mode": Foreign("the tokenizer's own format decides"),
    "model_impl": Foreign("plait has one implementation of each family"),
    "max_parallel_loading_workers": Foreign("weights are read one file at a time"),
    "enable_reasoning": Foreign("reasoning is told apart as reasoning_parser says", takes_value=False),
    "chat_template_content_format": Foreign("what a template reads is found by trying it"),
    "enable_prompt_tokens_details": Foreign("usage always has cached tokens", takes_value=False),
    "exclude_tools_when_tool_choice_none": Foreign(
        "tools are left out of the prompt where tool_choice is none", takes_value=False
    ),
    "enable_tokenizer_info_endpoint": Foreign("see /tokenize and /v1/models", takes_value=False),
    "disable_uvicorn_access_log": Foreign(_LOGS, takes_value=False),
    "disable_access_log_for_endpoints": Foreign(_LOGS),
    "max_log_len": Foreign(_LOGS),
    "enable_request_id_headers": Foreign("every answer has an x-request-id", takes_value=False),
    "collect_detailed_traces": Foreign("spans have the times of queue, prefill and decode"),
    # accepted only where they ask for nothing
    "otlp_traces_endpoint": Foreign("only plait serve sends traces", accepts=_OFF),
    "enable_ssl_refresh": Foreign("restart the server for a new certificate", False, _OFF),
    "response_role": Foreign("answers are the assistant's", accepts=("assistant",)),
    "structured_outputs_config": Foreign("structured output has nothing to set", accepts=(*_OFF, "{}")),
    "guided_decoding_backend": Foreign("llguidance does it", accepts=(*_OFF, "auto", "guidance")),
    "tool_parser_plugin": Foreign(
        "formats of tool calls are tables of plait; see tool_call_parser", accepts=_OFF
    ),
    "reasoning_parser_plugin": Foreign("formats of reasoning are plait's own", accepts=_OFF),
    "trust_request_chat_template": Foreign("the server has one chat template", False, _OFF),
    "generation_config": Foreign("the model's own generation_config.json is used", accepts=("auto",)),
    "runner": Foreign("plait generates text; it has no pooling models", accepts=("auto", "generate")),
    "task": Foreign("plait generates text; it has no pooling models", accepts=("auto", "generate")),
    "cpu_offload_gb": Foreign("weights stay on the device; there is no offloading", accepts=("0", "0.0")),
    "pipeline_parallel_size": Foreign("a model is split by heads (tensor_parallel_size) only", accepts=_ONE),
    "data_parallel_size": Foreign("run one plait for each replica", accepts=_ONE),
    "api_server_count": Foreign("only plait serve has such processes", accepts=_ONE),
    "enable_expert_parallel": Foreign("experts are not spread over ranks", takes_value=False, accepts=_OFF),
    "enable_lora": Foreign("adapters are not served; merge them into the weights", False, _OFF),
    "speculative_config": Foreign("speculative decoding is not available", accepts=_OFF),
    "hf_overrides": Foreign("edit the model's config.json instead", accepts=(*_OFF, "{}")),
    "override_generation_config": Foreign("set sampling parameters in the request", accepts=(*_OFF, "{}")),
}


def answer_to(name: str, value: object = True) -> str | None:
    """What to say about a setting of vLLM; None where it asks for nothing (off, or None).

    Raises:
        KeyError: the setting is not in the table.
        ValueError: plait cannot do what is asked.
    """
    foreign = FOREIGN[name]
    text = str(value).lower()
    if value is None or value is False:
        return None
    if foreign.accepts is not None:
        if text in foreign.accepts:
            return None
        works = f"; accepted: {' or '.join(a for a in foreign.accepts if a)}" if foreign.takes_value else ""
        raise ValueError(f"{name}={value!r} cannot be served: {foreign.says}{works}")
    return f"{name} has no effect: {foreign.says}"
