"""The parts that families are composed of. Each part reads its own weights and calls the backend.

Activations are [T, ...] in the model's dtype; T counts the tokens of a flat batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from plait.kernels.backend import AttentionParams, DeltaParams, MoeParams, Packed, Rows
from plait.kernels.batch import Batch
from plait.kernels.decoder import LayerParams, NormParams
from plait.kernels.layout import CacheViews
from plait.models.config import AttentionConfig, DeltaConfig, ModelConfig, MoeConfig
from plait.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass sees: the batch, the cache, and cos and sin [T, R] of its rows."""

    batch: Batch
    caches: CacheViews
    cos: torch.Tensor
    sin: torch.Tensor


class Mixer(Protocol):
    """Mixes tokens of a request: attention or recurrence, between two projections."""

    index: int
    in_proj: Packed
    out_proj: Packed

    @property
    def params(self) -> AttentionParams | DeltaParams: ...

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor: ...


class FeedForward(Protocol):
    """Works on each token alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class RMSNorm:
    """Weight and epsilon of an RMS norm. ``plus_one``: the checkpoint stores w and means 1 + w."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, *, plus_one: bool = False) -> None:
        weight = weights.vector(f"{name}.weight", size)
        self.weight = weight + 1.0 if plus_one else weight
        self.eps = eps
        self._backend = weights.backend

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._backend.rms_norm(x, self.weight, self.eps)

    @property
    def params(self) -> NormParams:
        return NormParams(self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum)."""
        return self._backend.add_rms_norm(x, residual, self.weight, self.eps)


class Attention:
    """Full attention with grouped key-value heads; head norms and an output gate where the config has them.

    The projections to q, gate, k and v are one packed layer with rows in that order. q_proj of gated
    checkpoints holds query and gate head by head, so its rows are sorted on load.

    Args:
        index: which attention layer of the cache this is.
    """

    def __init__(self, weights: Weights, config: ModelConfig, index: int) -> None:
        self.index = index
        self._backend = weights.backend
        attention, hidden = config.attention, config.hidden_size
        heads, dim = attention.num_heads, attention.head_dim
        q_norm = k_norm = None
        if attention.head_norm:
            q_norm, k_norm = (
                RMSNorm(weights, name, dim, config.rms_norm_eps, plus_one=config.norm_plus_one).weight
                for name in ("q_norm", "k_norm")
            )
        self.params = AttentionParams(
            num_heads=heads, num_kv_heads=attention.num_kv_heads, head_dim=dim, scale=dim**-0.5,
            eps=config.rms_norm_eps, q_norm=q_norm, k_norm=k_norm, output_gate=attention.output_gate,
        )  # fmt: skip
        self.in_proj = weights.pack(*_read_qkv(weights, attention, hidden))
        self.out_proj = weights.linear("o_proj", hidden, heads * dim, bias=attention.out_bias)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        projected = self._backend.linear(x, self.in_proj)
        cache = step.caches.attention[self.index]
        mixed = self._backend.attention_mixer(projected, self.params, step.cos, step.sin, cache, step.batch)
        return self._backend.linear(mixed, self.out_proj)


def _read_qkv(
    weights: Weights, attention: AttentionConfig, hidden: int
) -> tuple[list[Rows], torch.Tensor | None]:
    """Rows of q, gate (where there is one), k and v, and their bias where there is one."""
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    parts = 2 if attention.output_gate else 1

    def sort_gate(rows: torch.Tensor) -> torch.Tensor:
        """Query and gate of head 0, of head 1, ... to all queries, then all gates."""
        return rows.view(heads, parts, dim, -1).transpose(0, 1).reshape(rows.shape)

    sizes = {"q_proj": heads * parts * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    rows = [
        weights.rows(f"{name}.weight", size, hidden, reorder=sort_gate if name == "q_proj" else None)
        for name, size in sizes.items()
    ]
    if not attention.qkv_bias:
        return rows, None
    q, k, v = (weights.raw(f"{name}.bias", (size,)) for name, size in sizes.items())
    return rows, torch.cat((sort_gate(q), k, v))


class GatedDeltaNet:
    """Gated DeltaNet (Yang et al., 2024): short convolution, gated delta rule, gated norm.

    The projections to qkv, z, b and a are one packed layer. Rows of qkv, and the convolution's channels,
    are sorted by key-head group, so that the state of a group is one contiguous range.

    Args:
        index: which recurrent layer of the cache this is.
    """

    def __init__(self, weights: Weights, config: ModelConfig, index: int) -> None:
        assert config.delta is not None
        self.index = index
        self._backend = weights.backend
        delta, hidden = config.delta, config.hidden_size
        heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
        channels = 2 * delta.num_key_heads * delta.key_dim + values
        sort = partial(group_major, delta=delta)
        qkv = weights.rows("in_proj_qkv.weight", channels, hidden, reorder=sort)
        z = weights.rows("in_proj_z.weight", values, hidden)
        b, a = (weights.rows(f"in_proj_{name}.weight", heads, hidden, exact=True) for name in "ba")
        self.in_proj = weights.pack([qkv, z, b, a])
        self.out_proj = weights.linear("out_proj", hidden, values)
        conv = weights.raw("conv1d.weight", (channels, 1, delta.conv_width)).squeeze(1)
        self.params = DeltaParams(
            groups=delta.num_key_heads, value_heads=delta.value_heads_per_group,
            key_dim=delta.key_dim, value_dim=delta.value_dim,
            conv_weight=weights.keep(group_major(conv, delta)),
            decay_rate=-torch.exp(weights.vector("A_log", heads)),
            dt_bias=weights.vector("dt_bias", heads),
            norm=weights.vector("norm.weight", delta.value_dim), eps=config.rms_norm_eps,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        projected = self._backend.linear(x, self.in_proj)
        cache = step.caches.recurrent[self.index]
        mixed = self._backend.delta_mixer(projected, self.params, cache, step.batch)
        return self._backend.linear(mixed, self.out_proj)


def group_major(rows: torch.Tensor, delta: DeltaConfig) -> torch.Tensor:
    """Sort rows [all q | all k | all v, n] by key-head group: [q, k, v of group 0 | of group 1 | ..., n]."""
    groups, keys = delta.num_key_heads, delta.num_key_heads * delta.key_dim
    parts = torch.split(rows, [keys, keys, rows.shape[0] - 2 * keys])
    return torch.cat([part.view(groups, -1, rows.shape[1]) for part in parts], dim=1).flatten(0, 1)


class MLP:
    """down(SiLU(gate(x)) · up(x))."""

    def __init__(self, weights: Weights, hidden: int, inner: int, *, bias: bool = False) -> None:
        self._backend = weights.backend
        self.gate_up = weights.fused({"gate_proj": inner, "up_proj": inner}, hidden, bias=bias)
        self.down = weights.linear("down_proj", hidden, inner, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._backend.mlp(x, self.gate_up, self.down)


class MoE:
    """A mixture of gated MLPs, with a shared one behind a gate of its own.

    Experts come one by one (``experts.3.gate_proj``) or fused (``experts.gate_up_proj`` [E, 2 I, H], gate
    rows first, and ``experts.down_proj`` [E, H, I]).
    """

    def __init__(self, weights: Weights, moe: MoeConfig, hidden: int) -> None:
        self._backend = weights.backend
        self.params = MoeParams(
            router=weights.linear("gate", moe.num_experts, hidden, exact=True),
            experts=weights.count(self._backend.pack_experts(*_read_experts(weights, moe, hidden))),
            top_k=moe.top_k,
            renormalise=moe.renormalise,
        )
        if moe.shared_intermediate_size:
            shared = MLP(weights.under("shared_expert"), hidden, moe.shared_intermediate_size)
            self.params = replace(
                self.params, shared_gate_up=shared.gate_up, shared_down=shared.down,
                shared_gate=weights.linear("shared_expert_gate", 1, hidden, exact=True),
            )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._backend.moe(x, self.params)


def _read_experts(
    weights: Weights, moe: MoeConfig, hidden: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per expert: gate and up rows [2 I, H], and down [H, I]."""
    count, inner = moe.num_experts, moe.intermediate_size
    scope = weights.under("experts")
    if scope.has("gate_up_proj"):
        gate_up = scope.matrix("gate_up_proj", (count, 2 * inner, hidden))
        return list(gate_up), list(scope.matrix("down_proj", (count, hidden, inner)))
    pairs, downs = [], []
    for expert in range(count):
        one = scope.under(str(expert))
        halves = [one.matrix(f"{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
        pairs.append(torch.cat(halves))
        downs.append(one.matrix("down_proj.weight", (hidden, inner)))
    return pairs, downs


class DecoderLayer:
    """x + mixer(norm(x)), then x + feed_forward(norm(x)).

    The sum is carried beside the last output, so that each addition joins the norm that follows it.
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, mixer: Mixer, feed_forward: FeedForward
    ) -> None:
        self.mixer, self.feed_forward = mixer, feed_forward
        self.input_norm, self.post_norm = (
            RMSNorm(weights, name, config.hidden_size, config.rms_norm_eps, plus_one=config.norm_plus_one)
            for name in ("input_layernorm", "post_attention_layernorm")
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns (last output, sum so far); the first layer's input has no sum yet."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.mixer(x, step)
        x, residual = self.post_norm.add(x, residual)
        return self.feed_forward(x), residual

    @property
    def params(self) -> LayerParams:
        """What the layer is made of, for backends that run whole layers."""
        mixer, feed_forward = self.mixer, self.feed_forward
        return LayerParams(
            input_norm=self.input_norm.params,
            in_proj=mixer.in_proj,
            mixer=mixer.params,
            index=mixer.index,
            out_proj=mixer.out_proj,
            post_norm=self.post_norm.params,
            feed_forward=feed_forward,
            mlp=(feed_forward.gate_up, feed_forward.down) if isinstance(feed_forward, MLP) else None,
        )
