"""Naive float64 twins of the kernels: loops over tokens, heads and numbers, written from the formulas.

They know nothing of pages, slots, chunks or batches: each works on one whole request.
"""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def silu(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (1.0 + torch.exp(-x))


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, D]; each pair (i, i + R) turned by its angle."""
    out = x.double().clone()
    half = cos.shape[1]
    for token in range(x.shape[0]):
        for i in range(half):
            a, b = x[token, :, i].double(), x[token, :, i + half].double()
            c, s = cos[token, i].double(), sin[token, i].double()
            out[token, :, i], out[token, :, i + half] = a * c - b * s, b * c + a * s
    return out


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a whole request: ``q`` [T, heads, D], ``k`` and ``v`` [T, kv_heads, D]."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = [torch.dot(q[token, head], k[past, head // group]) * scale for past in range(token + 1)]
            weights = torch.softmax(torch.stack(scores), 0)
            out[token, head] = sum(weights[past] * v[past, head // group] for past in range(token + 1))
    return out.flatten(1)


def causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, channels], ``weight`` [channels, width], zeros before the first token."""
    x, weight = x.double(), weight.double()
    out = torch.zeros_like(x)
    width = weight.shape[1]
    for token in range(x.shape[0]):
        for tap in range(width):
            source = token - width + 1 + tap
            if source >= 0:
                out[token] += weight[:, tap] * x[source]
    return silu(out)


def gated_delta(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    shape: tuple[int, int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request; ``shape``: (groups, value heads of a group, dk, dv). Returns o and the states after
    every token, [T, V, dv] and [T, V, dk, dv]."""
    groups, per_group, dk, dv = shape
    tokens = qkv.shape[0]
    out = torch.zeros(tokens, groups * per_group, dv, dtype=torch.float64)
    states = torch.zeros(tokens, groups * per_group, dk, dv, dtype=torch.float64)
    for head in range(groups * per_group):
        group, member = divmod(head, per_group)
        first = group * (2 * dk + per_group * dv)
        state = torch.zeros(dk, dv, dtype=torch.float64)
        for token in range(tokens):
            row = qkv[token].double()
            q, k = row[first : first + dk], row[first + dk : first + 2 * dk]
            v = row[first + 2 * dk + member * dv :][:dv]
            q = q / torch.sqrt((q * q).sum() + 1e-6) / math.sqrt(dk)
            k = k / torch.sqrt((k * k).sum() + 1e-6)
            step = torch.log1p(torch.exp(a[token, head].double() + dt_bias[head].double()))
            state = torch.exp(decay_rate[head].double() * step) * state
            beta = 1.0 / (1.0 + torch.exp(-b[token, head].double()))
            state = state + torch.outer(k, beta * (v - state.T @ k))
            states[token, head] = state
            out[token, head] = state.T @ q
    return out, states


def moe(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    renormalise: bool,
) -> torch.Tensor:
    """Without shared expert; ties go to the lower id."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    inner = down.shape[2]
    for token, row in enumerate(x.double()):
        probabilities = torch.softmax(router.double() @ row, 0).tolist()
        chosen = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[:top_k]
        total = sum(probabilities[i] for i in chosen) if renormalise else 1.0
        for expert in chosen:
            hidden = gate_up[expert].double() @ row
            hidden = silu(hidden[:inner]) * hidden[inner:]
            out[token] += probabilities[expert] / total * (down[expert].double() @ hidden)
    return out
