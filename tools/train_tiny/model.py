"""Qwen3.5's text model in plain torch, for training: parameters carry the names of its checkpoints.

Three Gated DeltaNet layers to one of gated attention. Norm weights are stored as w and mean 1 + w, except in
the norm behind Gated DeltaNet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; the names are those of ``Qwen3_5TextConfig``."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The gated delta rule over whole sequences from a zero state, in chunks (Yang et al., arXiv:2412.06464).

    Args:
        q, k: [N, T, dk], normalised, q scaled. v: [N, T, dv].
        log_decay, beta: [N, T]; the state decays by exp(log_decay).
        chunk: divides T.

    Returns:
        [N, T, dv]
    """
    n, length, _ = q.shape
    q, k, v = (x.reshape(n, length // chunk, chunk, -1) for x in (q, k, v))
    beta = beta.reshape(n, -1, chunk, 1)
    total = log_decay.reshape(n, -1, chunk).cumsum(-1)
    decayed = total.exp().unsqueeze(-1)
    rest = (total[..., -1:] - total).exp().unsqueeze(-1)
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # The decay from each earlier token of a chunk to each later one.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~below, -math.inf).exp()
    keys = k.transpose(-1, -2)
    # What tokens of a chunk write depends on what those before them wrote: a triangular system.
    inverse = _inverse((k * beta @ keys * between).tril(-1))
    written = inverse @ (v * beta)
    erased = inverse @ (k * (beta * decayed))
    scores = q @ keys * between
    return _scan(written, erased, scores, q * decayed, (k * rest).transpose(-1, -2), decayed[:, :, -1:])


def _inverse(lower: Tensor) -> Tensor:
    """(1 + lower)^-1 for strictly lower triangular matrices [..., C, C].

    Its series in -lower ends before the C-th power, and is a product of factors 1 + lower^(2^i).
    """
    size = lower.shape[-1]
    result = torch.eye(size, dtype=lower.dtype, device=lower.device) - lower
    power, reached = lower, 2
    while reached < size:
        power = power @ power
        result = result + result @ power
        reached *= 2
    return result


def _scan(written: Tensor, erased: Tensor, scores: Tensor, q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Carry the state from chunk to chunk; all arguments are [N, chunks, ...]."""
    outputs: list[Tensor] = []
    state: Tensor | None = None
    chunks = written.shape[1]
    parts = zip(*(x.unbind(1) for x in (written, erased, scores, q, k, decay)), strict=True)
    for index, (write, erase, score, query, key, kept) in enumerate(parts):
        if state is None:
            outputs.append(torch.bmm(score, write))
            state = torch.bmm(key, write)
            continue
        new = torch.baddbmm(write, erase, state, alpha=-1)
        outputs.append(torch.baddbmm(torch.bmm(query, state), score, new))
        if index < chunks - 1:
            state = torch.baddbmm(state * kept, key, new)
    return torch.cat(outputs, 1)


class Norm(nn.Module):
    """RMS norm whose weight is stored less one."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + self.weight, EPS)


class GatedNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS) * F.silu(gate)


class GatedDeltaNet(nn.Module):
    """As many value heads as key heads."""

    def __init__(self, shape: Shape, chunk: int):
        super().__init__()
        self.heads, self.chunk = shape.linear_num_key_heads, chunk
        self.key_dim, self.value_dim = shape.linear_key_head_dim, shape.linear_value_head_dim
        if self.heads != shape.linear_num_value_heads:
            raise ValueError("linear_num_key_heads and linear_num_value_heads must be equal here")
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        channels, hidden = 2 * keys + values, shape.hidden_size
        self.sizes = [channels, values, self.heads, self.heads]
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.heads, bias=False)
        width = shape.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.norm = GatedNorm(self.value_dim)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> the same; T is a multiple of the chunk."""
        parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        projected = F.linear(x, torch.cat([part.weight for part in parts]))
        qkv, z, b, a = projected.split(self.sizes, -1)
        qkv = F.silu(_causal_conv(qkv, self.conv1d.weight))
        keys = self.heads * self.key_dim
        q, k, v = (self._by_head(part) for part in qkv.split([keys, keys, self.sizes[1]], -1))
        decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        mixed = delta_rule(
            _unit(q) * self.key_dim**-0.5,
            _unit(k),
            v,
            decay.transpose(1, 2).flatten(0, 1),
            b.sigmoid().transpose(1, 2).flatten(0, 1),
            self.chunk,
        )
        batch, length, _ = x.shape
        mixed = mixed.reshape(batch, self.heads, length, self.value_dim).transpose(1, 2)
        gated = self.norm(mixed, z.reshape(batch, length, self.heads, self.value_dim))
        return cast(Tensor, self.out_proj(gated.flatten(2)))

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, T, heads * d] -> [B * heads, T, d]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)


def _causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution of [B, T, C] with [C, 1, W] over this and earlier tokens."""
    width, length = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    taps = [padded[:, i : i + length] * weight[:, 0, i] for i in range(width)]
    return cast(Tensor, sum(taps[1:], taps[0]))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


class Attention(nn.Module):
    """Queries come with a gate for the output; queries and keys are normalised; a part of each head turns."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        hidden = shape.hidden_size
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (self.kv_heads, -1)) for proj in (self.k_proj, self.v_proj))
        q, k = (_turn(part.transpose(1, 2), cos, sin) for part in (self.q_norm(q), self.k_norm(k)))
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return cast(Tensor, self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2)))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions of [B, H, T, d]; cos and sin are [T, rotary]."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        gate, up = joined.chunk(2, -1)
        return cast(Tensor, self.down_proj(F.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int, chunk: int):
        super().__init__()
        self.attends = (index + 1) % 4 == 0
        if self.attends:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape, chunk)
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos, sin) if self.attends else self.linear_attn(normed))
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Stack(nn.Module):
    def __init__(self, shape: Shape, chunk: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i, chunk) for i in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size)


class TinyLM(nn.Module):
    """The whole model, with tied embeddings.

    Args:
        shape: sizes.
        seed: of the weights.
        chunk: tokens of a chunk of the delta rule; sequences are multiples of it.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seed: int = 0, chunk: int = 32):
        super().__init__()
        self.shape, self.chunk = shape, chunk
        self.model = Stack(shape, chunk)
        exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
        angles = torch.arange(shape.max_position_embeddings).unsqueeze(1) * shape.rope_theta**-exponents
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        initialise(self, seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, vocabulary]; T is a multiple of the chunk."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


@torch.no_grad()
def initialise(model: TinyLM, seed: int) -> None:
    """Where training begins. Three things matter for recall to be found at all: decays that keep the state
    for tens to thousands of tokens (Mamba's ranges of dt and A), attention that is sharp from the start, and
    a convolution that mostly passes its own token."""
    random = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * model.shape.num_hidden_layers)
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(0, 0.02, generator=random)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(0.6)
        elif name.endswith("conv1d.weight"):
            weight.uniform_(-0.5, 0.5, generator=random)
            weight[:, :, -1] += 0.5
        elif name.endswith("A_log"):
            weight.uniform_(1, 8, generator=random).log_()
        elif name.endswith("dt_bias"):
            steps = torch.logspace(math.log10(5e-4), -1, weight.numel())
            weight.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it gives the steps
        elif weight.dim() == 2:
            deep = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            std = 0.8 * weight.shape[1] ** -0.5 / (depth if deep else 1.0)
            weight.normal_(0, std, generator=random)
