"""Models of which only the sizes matter: for kernels, and for checkpoints with random weights."""

from __future__ import annotations

from typing import Any

from plait.models.config import ModelConfig
from plait.models.registry import parse_config

SMALL_ATTENTION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SMALL_HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}

SHAPES = {"135m": SMALL_ATTENTION, "0.8b": SMALL_HYBRID}
"""Short names of config.json contents: the shape of SmolLM2-135M, and a hybrid of 0.8 billion weights with
three Gated DeltaNet layers to one of attention."""


def config_of(name: str) -> ModelConfig:
    """The config of a shape, or of any model that ``plait serve`` takes.

    Raises:
        ValueError: there is no such shape or model.
    """
    if name in SHAPES:
        return parse_config(SHAPES[name])
    from plait.config import EngineArgs
    from plait.engine.resolve import resolve
    from plait.models.hub import resolve_model

    return resolve(EngineArgs(model=str(resolve_model(name)))).config
