"""Qwen3.5 and Qwen3.6: three Gated DeltaNet layers to one of gated full attention; dense or with experts.

Norm weights are stored as w and mean 1 + w, except the gated norm inside Gated DeltaNet. Rotary turns the
first quarter of each head. Multimodal checkpoints serve text: their vision tower is not loaded.
"""

from __future__ import annotations

import torch

from plait.models.config import DeltaConfig, LayerKind, ModelConfig, MoeConfig, Raw, UnsupportedModelError
from plait.models.layers import MLP, Attention, DecoderLayer, FeedForward, GatedDeltaNet, Mixer, MoE
from plait.models.parsing import (
    attention_config,
    check_common,
    common_fields,
    dtype_named,
    integer,
    layer_kinds,
    refuse_sliding_window,
    rope_config,
    text_part,
)
from plait.models.weights import Weights

DENSE = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = DENSE + MOE


def parse(architecture: str, raw: Raw) -> ModelConfig:
    """The config of a Qwen3.5 checkpoint, multimodal or text only."""
    text = text_part(raw)
    check_common(text)
    refuse_sliding_window(text, None)
    attention = attention_config(text, head_dim=256, head_norm=True, output_gate=True)
    if not text.get("attn_output_gate", True):
        raise UnsupportedModelError("attn_output_gate=false: Qwen3.5 without output gate is not built")
    experts = architecture in MOE
    notes = ("vision: not loaded; this model is served for text alone",) if "vision_config" in raw else ()
    return ModelConfig(
        architecture=architecture,
        layers=layer_kinds(text, _braid(text)),
        intermediate_size=0 if experts else integer(text, "intermediate_size"),
        attention=attention,
        delta=_delta(text),
        moe=_experts(text) if experts else None,
        rope=rope_config(text, attention.head_dim, partial=0.25),
        norm_plus_one=True,
        state_dtype=dtype_named(text.get("mamba_ssm_dtype"), "mamba_ssm_dtype", torch.float32),
        notes=notes,
        **common_fields(text),
    )


def _braid(text: Raw) -> tuple[LayerKind, ...]:
    """Layers of a config without ``layer_types``: every fourth (or as it says) is attention."""
    interval = integer(text, "full_attention_interval", 4)
    count = integer(text, "num_hidden_layers")
    return tuple("recurrent" if (index + 1) % interval else "attention" for index in range(count))


def _delta(text: Raw) -> DeltaConfig:
    delta = DeltaConfig(
        num_key_heads=integer(text, "linear_num_key_heads", 16),
        num_value_heads=integer(text, "linear_num_value_heads", 32),
        key_dim=integer(text, "linear_key_head_dim", 128),
        value_dim=integer(text, "linear_value_head_dim", 128),
        conv_width=integer(text, "linear_conv_kernel_dim", 4),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads={delta.num_value_heads} is no multiple of "
            f"linear_num_key_heads={delta.num_key_heads}"
        )
    return delta


def _experts(text: Raw) -> MoeConfig:
    return MoeConfig(
        num_experts=integer(text, "num_experts", 256),
        top_k=integer(text, "num_experts_per_tok", 8),
        intermediate_size=integer(text, "moe_intermediate_size", 512),
        shared_intermediate_size=integer(text, "shared_expert_intermediate_size", 512),
        renormalise=True,
    )


def layer(config: ModelConfig, index: int, weights: Weights) -> DecoderLayer:
    before = config.layers[:index]
    mixer: Mixer
    if config.layers[index] == "recurrent":
        mixer = GatedDeltaNet(weights.under("linear_attn"), config, before.count("recurrent"))
    else:
        mixer = Attention(weights.under("self_attn"), config, before.count("attention"))
    feed_forward: FeedForward
    if config.moe is not None:
        feed_forward = MoE(weights.under("mlp"), config.moe, config.hidden_size)
    else:
        feed_forward = MLP(weights.under("mlp"), config.hidden_size, config.intermediate_size)
    return DecoderLayer(weights, config, mixer, feed_forward)
