"""What a model is: parsed from the ``config.json`` of a checkpoint.

A family's ``parse`` puts a ``ModelConfig`` together from the readers here, so that every family refuses
the same things in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from plait.kernels.layout import CacheLayout, PageLayout, StateLayout

Raw = Mapping[str, Any]
"""A parsed config.json, or a part of it."""

LayerKind = Literal["attention", "recurrent"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnsupportedModelError(ValueError):
    """The model needs something that plait does not do; the message says what."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Args:
        theta: base of the frequencies.
        rotary_dim: numbers of each head that are rotated, from the first on.
        kind: "default", "linear" (positions divided by ``factor``) or "llama3" (long wavelengths stretched).
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Full attention. ``qkv_bias`` and ``out_bias``: whether the projections have a bias.

    ``head_norm``: q and k are normalised per head. ``output_gate``: q_proj also holds a gate per head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: bool = False
    output_gate: bool = False


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated DeltaNet. Key head ``g`` serves ``num_value_heads / num_key_heads`` consecutive value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def value_heads_per_group(self) -> int:
        return self.num_value_heads // self.num_key_heads


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts; ``shared_intermediate_size`` is 0 without a shared expert."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model, whole. Sizes are in numbers, not bytes.

    Args:
        architecture: as in config.json.
        layers: the kind of each layer, from the first.
        intermediate_size: of the dense MLP; 0 when ``moe`` holds.
        norm_plus_one: norm weights are stored as w and mean 1 + w.
        dtype: of the checkpoint's weights.
        state_dtype: of the temporal state (``mamba_ssm_dtype``; float32 when the checkpoint says nothing).
        eos_token_ids: ids that end an answer, by config.json (generation_config.json may add more).
        notes: what was left out, in words, for start-up to report.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    delta: DeltaConfig | None = None
    moe: MoeConfig | None = None
    norm_plus_one: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_attention_layers(self) -> int:
        return self.layers.count("attention")

    @property
    def num_recurrent_layers(self) -> int:
        return self.layers.count("recurrent")

    def describe(self) -> str:
        """The model in a few lines of words, its braid of layers among them."""
        attention, lines = self.attention, []
        lines.append(
            f"{self.architecture}: {self.num_layers} layers of width {self.hidden_size}, "
            f"vocabulary {self.vocab_size:,}, up to {self.max_position_embeddings:,} tokens"
        )
        lines.append(
            f"attention: layers {_spans(self.layers, 'attention')}; {attention.num_heads} query and "
            f"{attention.num_kv_heads} key-value heads of {attention.head_dim}"
        )
        if self.delta is not None and self.num_recurrent_layers:
            delta = self.delta
            lines.append(
                f"recurrent (Gated DeltaNet): layers {_spans(self.layers, 'recurrent')}; "
                f"{delta.num_key_heads} key heads of {delta.key_dim}, "
                f"{delta.num_value_heads} value heads of {delta.value_dim}"
            )
        else:
            lines.append("recurrent: none")
        if self.moe is not None:
            shared = " and a shared one" if self.moe.shared_intermediate_size else ""
            lines.append(f"experts: {self.moe.top_k} of {self.moe.num_experts}{shared}")
        return "\n".join((*lines, *self.notes))

    def cache_layout(
        self,
        page_size: int,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> CacheLayout:
        """The layout of this model's pages and states.

        Args:
            page_size: tokens per page, a multiple of 16.
            dtype: of activations; conv columns keep them as they are.
            kv_dtype: of the pages' entries; None: ``dtype``.
            state_dtype: of the temporal state; None: the checkpoint's.
        """
        attention, delta = self.attention, self.delta
        page = PageLayout(
            page_size, self.num_attention_layers, attention.num_kv_heads, attention.head_dim,
            kv_dtype or dtype,
        )  # fmt: skip
        if delta is None or not self.num_recurrent_layers:
            return CacheLayout(page)
        state = StateLayout(
            num_layers=self.num_recurrent_layers,
            num_groups=delta.num_key_heads,
            value_heads=delta.value_heads_per_group,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            conv_width=delta.conv_width,
            conv_dtype=dtype,
            dtype=state_dtype or self.state_dtype,
        )
        return CacheLayout(page, state)


def _spans(layers: tuple[LayerKind, ...], kind: LayerKind) -> str:
    """Indices of one kind: "3, 7, 11" or "0-2, 4-6"."""
    spans: list[list[int]] = []
    for index, found in enumerate(layers):
        if found != kind:
            continue
        if spans and spans[-1][-1] == index - 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    words = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans]
    return f"{', '.join(words)} ({layers.count(kind)} of {len(layers)})"
