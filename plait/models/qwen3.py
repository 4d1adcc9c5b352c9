"""Qwen3 (dense): Llama with a norm on each query and key head."""

from __future__ import annotations

from plait.models.config import ModelConfig, Raw
from plait.models.llama import layer
from plait.models.parsing import (
    all_attention,
    attention_config,
    check_common,
    common_fields,
    integer,
    refuse_sliding_window,
    rope_config,
)

ARCHITECTURES = ("Qwen3ForCausalLM",)

__all__ = ["ARCHITECTURES", "layer", "parse"]


def parse(architecture: str, raw: Raw) -> ModelConfig:
    """The config of a Qwen3 checkpoint. Layers from ``max_window_layers`` on may slide, when switched on."""
    check_common(raw)
    first = raw.get("max_window_layers", 28)
    slides = raw.get("use_sliding_window", False) and first < integer(raw, "num_hidden_layers")
    refuse_sliding_window(raw, raw.get("sliding_window", 4096) if slides else None)
    attention = attention_config(raw, head_dim=128, head_norm=True)
    return ModelConfig(
        architecture=architecture,
        layers=all_attention(raw),
        intermediate_size=integer(raw, "intermediate_size"),
        attention=attention,
        rope=rope_config(raw, attention.head_dim),
        **common_fields(raw),
    )
