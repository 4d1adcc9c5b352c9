"""Llama (Touvron et al., 2023; Llama 3, 2024) and Mistral: attention and a gated MLP in every layer."""

from __future__ import annotations

from plait.models.config import ModelConfig, Raw
from plait.models.layers import MLP, Attention, DecoderLayer
from plait.models.parsing import (
    all_attention,
    attention_config,
    check_common,
    common_fields,
    integer,
    refuse_sliding_window,
    rope_config,
)
from plait.models.weights import Weights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

MISTRAL_WINDOW = 4096
"""The sliding window of a Mistral config that does not mention one."""


def parse(architecture: str, raw: Raw) -> ModelConfig:
    """The config of a Llama or Mistral checkpoint; a null ``sliding_window`` means full attention."""
    check_common(raw)
    mistral = architecture == "MistralForCausalLM"
    refuse_sliding_window(raw, raw.get("sliding_window", MISTRAL_WINDOW) if mistral else None)
    attention = attention_config(raw)
    return ModelConfig(
        architecture=architecture,
        layers=all_attention(raw),
        intermediate_size=integer(raw, "intermediate_size"),
        attention=attention,
        rope=rope_config(raw, attention.head_dim),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        **common_fields(raw),
    )


def layer(config: ModelConfig, index: int, weights: Weights) -> DecoderLayer:
    attention = Attention(weights.under("self_attn"), config, index)
    mlp = MLP(weights.under("mlp"), config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return DecoderLayer(weights, config, attention, mlp)
