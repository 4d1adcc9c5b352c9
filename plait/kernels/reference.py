"""The reference backend: plain torch, any device, any float dtype. Clear first, quick enough second.

It accumulates in float32, or in float64 when its inputs are float64. It is not row-invariant: torch's
matrix products choose their arithmetic by shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F

from plait.kernels.backend import Backend, MoeParams, Packed
from plait.kernels.batch import Batch
from plait.kernels.layout import BLOCK, PLAIN_DTYPES, AttentionCache, RecurrentCache
from plait.kernels.registry import register

QUERY_TILE = 256
"""Most query rows that attend at once."""

SCORE_BUDGET = 1 << 24
"""Most scores (heads x rows x keys) held at once: 64 MiB in float32."""

HEAD_TILE = 8192
"""Rows of a low-precision weight widened at once."""


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    shared: bool = False

    @property
    def nbytes(self) -> int:
        if self.shared:
            return 0
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class _Experts:
    gate_up: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.gate_up + self.down)


class ReferenceBackend(Backend):
    """Every operation as its formula says."""

    name = "reference"
    version = "1"
    row_invariant = False
    state_grid = 1
    priority = 0

    def unavailable(self, device: str) -> str | None:
        try:
            kind = torch.device(device).type
        except RuntimeError:
            return f"{device!r} is not a torch device"
        if kind == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return None

    def supports(
        self,
        *,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        page_size: int | None = None,
    ) -> str | None:
        names = ", ".join(str(known).removeprefix("torch.") for known in PLAIN_DTYPES[:3])
        for what, asked in (("dtype", dtype), ("KV cache dtype", kv_dtype), ("state dtype", state_dtype)):
            if asked is not None and asked not in PLAIN_DTYPES:
                asked_name = str(asked).removeprefix("torch.")
                return f"{what} {asked_name} is not built yet in backend {self.name!r}; use one of {names}"
        if page_size is not None and (page_size < BLOCK or page_size % BLOCK):
            return f"page size {page_size} is not a multiple of {BLOCK}"
        return None

    # Weights

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        return _Linear(weight.contiguous(), bias)

    def pack_embedding(self, weight: torch.Tensor) -> Packed:
        return _Linear(weight.contiguous())

    def tied_head(self, embedding: Packed) -> Packed:
        return _Linear(_own(embedding).weight, shared=True)

    def pack_experts(self, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> Packed:
        return _Experts(tuple(gate_up), tuple(down))

    # Small operations

    def linear(
        self, x: torch.Tensor, packed: Packed, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        weight, bias = _own(packed).weight, _own(packed).bias
        if out_dtype is None or out_dtype == x.dtype:
            return F.linear(x, weight, bias)
        # torch would round a low-precision product before it could be widened: widen the inputs, by tiles.
        wide = x.to(out_dtype)
        tiles = [F.linear(wide, tile.to(out_dtype)) for tile in torch.split(weight, HEAD_TILE)]
        out = torch.cat(tiles, dim=-1)
        return out if bias is None else out + bias.to(out_dtype)

    def embedding(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        return F.embedding(token_ids, _own(packed).weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        wide = _wide(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        return (wide * F.silu(_wide(gate))).to(x.dtype)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1]
        wide = _wide(x)
        left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = (left * cos - right * sin, right * cos + left * sin, rest)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = _wide(x).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def paged_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: AttentionCache,
        batch: Batch,
        *,
        scale: float,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _write_pages(k, v, cache, batch)
        out = torch.empty_like(q)
        for index, context in enumerate(batch.context_lens_host):
            first, last = batch.query_start_host[index : index + 2]
            keys, values = _read_pages(cache, batch.page_table[index], context + last - first)
            queries = _wide(q[first:last])
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
            out[first:last] = _attend(queries, keys, values, context, scale)
        if gate is not None:
            out = (_wide(out) * torch.sigmoid(_wide(gate))).to(q.dtype)
        return out.flatten(1)

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        columns, starts = cache.layout.conv_columns, batch.query_start_host
        before = _read_states(cache.conv, batch).transpose(1, 2).flatten(2)  # [B, columns, channels]
        # Each chunk with its columns in front: row r of chunk b moves down by (b + 1) * columns.
        pieces: list[torch.Tensor] = []
        for index in range(batch.num_chunks):
            pieces += [before[index].to(x.dtype), x[starts[index] : starts[index + 1]]]
        inputs = torch.cat(pieces)
        lengths = torch.diff(batch.query_start).long()
        chunk = torch.arange(batch.num_chunks, device=x.device).repeat_interleave(lengths)
        rows = torch.arange(x.shape[0], device=x.device) + chunk * columns
        wide, taps = _wide(inputs), weight.to(_wide(inputs).dtype)
        out = wide[rows] * taps[:, 0]
        for tap in range(1, columns + 1):
            out += wide[rows + tap] * taps[:, tap]

        ends = [
            (index, starts[index + 1] - starts[index], slot) for index, slot in enumerate(batch.slots_host)
        ]
        for index, tokens, target in (*ends, *batch.exports):
            top = starts[index] + index * columns + tokens
            after = torch.unflatten(inputs[top : top + columns], 1, (cache.layout.num_groups, -1))
            cache.conv[target] = after.transpose(0, 1).to(cache.conv.dtype)
        return F.silu(out).to(x.dtype)

    def gated_delta(
        self,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        cache: RecurrentCache,
        batch: Batch,
    ) -> torch.Tensor:
        layout = cache.layout
        order, rows, counts = _time_major(batch.query_start_host)
        index = torch.tensor(rows, device=qkv.device)
        parts = torch.unflatten(_wide(qkv)[index], -1, (layout.num_groups, layout.group_channels))
        q, k, v = torch.split(parts, layout.column_splits, dim=-1)
        q = _unit(q) * layout.key_dim**-0.5
        q, k = (part.repeat_interleave(layout.value_heads, dim=1) for part in (q, _unit(k)))
        v = v.reshape(len(rows), -1, layout.value_dim)
        beta = torch.sigmoid(_wide(b)[index]).unsqueeze(-1)
        decay = torch.exp(decay_rate * F.softplus(_wide(a)[index] + dt_bias))[..., None, None]

        state = _read_states(cache.temporal, batch).flatten(1, 2).to(v.dtype)[list(order)]
        out = _recur(state, q, k, v, beta, decay, counts, _exports_by_time(batch, order), cache)
        slots = batch.slots[list(order)].long()
        cache.temporal[slots] = torch.unflatten(state, 1, (layout.num_groups, -1)).to(cache.temporal.dtype)
        result = torch.empty_like(out)
        result[index] = out
        return result.to(qkv.dtype)

    def moe(self, x: torch.Tensor, params: MoeParams) -> torch.Tensor:
        experts = params.experts
        assert isinstance(experts, _Experts)
        logits = self.linear(x, params.router, out_dtype=_wide(x).dtype)
        ranked, ids = torch.sort(torch.softmax(logits, dim=-1), dim=-1, descending=True, stable=True)
        weights, ids = ranked[:, : params.top_k], ids[:, : params.top_k]
        if params.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = _wide(x).new_empty(x.shape[0], params.top_k, x.shape[1])
        for expert in torch.unique(ids).tolist():
            token, choice = torch.where(ids == expert)
            hidden = self.silu_and_mul(F.linear(x[token], experts.gate_up[expert]))
            outputs[token, choice] = _wide(F.linear(hidden, experts.down[expert]))
        total = outputs[:, 0] * weights[:, :1]
        for rank in range(1, params.top_k):
            total += outputs[:, rank] * weights[:, rank : rank + 1]
        if params.shared_gate_up is not None and params.shared_down is not None:
            shared = _wide(self.mlp(x, params.shared_gate_up, params.shared_down))
            if params.shared_gate is not None:
                shared = shared * torch.sigmoid(self.linear(x, params.shared_gate, out_dtype=shared.dtype))
            total += shared
        return total.to(x.dtype)


def _own(packed: Packed) -> _Linear:
    assert isinstance(packed, _Linear), f"{type(packed).__name__} was packed by another backend"
    return packed


def _wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that sums are taken in."""
    return x if x.dtype == torch.float64 else x.float()


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(Σx² + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# Pages


def _write_pages(k: torch.Tensor, v: torch.Tensor, cache: AttentionCache, batch: Batch) -> None:
    """Store keys and values [T, kv_heads, D] at their positions; lanes beyond D become zero."""
    layout = cache.layout
    lengths = torch.diff(batch.query_start).long()
    chunk = torch.arange(batch.num_chunks, device=k.device).repeat_interleave(lengths)
    page = batch.page_table[chunk, batch.positions // layout.page_size].long()
    block, lane = batch.positions % layout.page_size // BLOCK, batch.positions % BLOCK
    padding = (0, layout.padded_dim - layout.head_dim)
    cache.k[page, :, block, :, lane] = F.pad(k, padding).to(layout.dtype)
    values = F.pad(v, padding).to(layout.dtype)
    cache.v[page, :, block, :, lane] = torch.unflatten(values, -1, (-1, BLOCK))


def _read_pages(cache: AttentionCache, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [kv_heads, D, length] and values [kv_heads, length, D] of the first ``length`` positions."""
    layout = cache.layout
    pages = table[: -(-length // layout.page_size)].long()
    k = cache.k[pages].permute(1, 3, 0, 2, 4).flatten(2)  # [heads, D, pages x blocks x lanes]
    v = cache.v[pages].permute(1, 0, 2, 4, 3, 5).flatten(4).flatten(1, 3)
    return k[:, : layout.head_dim, :length], v[:, :length, : layout.head_dim]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """Causal attention of one chunk: ``q`` [L, heads, D] at positions from ``context`` on.

    ``k`` [kv_heads, D, S] and ``v`` [kv_heads, S, D], S = context + L. Returns [L, heads, D].
    """
    length, heads, dim = q.shape
    kv_heads, total = k.shape[0], k.shape[2]
    tile = max(1, min(QUERY_TILE, SCORE_BUDGET // (heads * total)))
    out = torch.empty_like(q)
    for first in range(0, length, tile):
        last = min(first + tile, length)
        seen = context + last
        rows = torch.unflatten(q[first:last] * scale, 1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores = rows.flatten(1, 2) @ k[:, :, :seen]  # [kv_heads, heads of each x rows, keys]
        scores = torch.unflatten(scores, 1, (-1, last - first))
        if last - first > 1:
            position = torch.arange(context + first, seen, device=q.device)
            hidden = torch.arange(seen, device=q.device) > position[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = torch.softmax(scores, dim=-1).flatten(1, 2) @ v[:, :seen]
        mixed = torch.unflatten(mixed, 1, (-1, last - first)).permute(2, 0, 1, 3)
        out[first:last] = mixed.reshape(-1, heads, dim)
    return out


# Recurrent states


def _read_states(view: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The state of each chunk, [B, ...]; zeros, unread, where a chunk has no context."""
    states = torch.zeros((batch.num_chunks, *view.shape[1:]), dtype=view.dtype, device=view.device)
    live = [index for index, context in enumerate(batch.context_lens_host) if context > 0]
    if live:
        states[live] = view[batch.slots[live].long()]
    return states


@lru_cache(maxsize=8)
def _time_major(starts: tuple[int, ...]) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Rows of a batch reordered so that the recurrence steps over all chunks at once.

    Returns (order, rows, counts): chunks from the longest to the shortest; the batch's rows as first tokens
    of all chunks, second tokens of those that have one, ...; and how many rows each step has. Since the
    longest come first, the rows of a step are those of the first ``count`` chunks of ``order``.
    """
    lengths = [last - first for first, last in pairwise(starts)]
    order = tuple(sorted(range(len(lengths)), key=lambda index: -lengths[index]))
    rows: list[int] = []
    counts: list[int] = []
    active = len(order)
    for time in range(lengths[order[0]] if order else 0):
        while lengths[order[active - 1]] <= time:
            active -= 1
        rows += [starts[index] + time for index in order[:active]]
        counts.append(active)
    return order, rows, counts


def _exports_by_time(batch: Batch, order: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Tokens done -> (place in ``order``, target state) of the exports due then."""
    place = {index: position for position, index in enumerate(order)}
    due: dict[int, list[tuple[int, int]]] = {}
    for index, tokens, target in batch.exports:
        due.setdefault(tokens, []).append((place[index], target))
    return due


def _recur(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    counts: Sequence[int],
    due: dict[int, list[tuple[int, int]]],
    cache: RecurrentCache,
) -> torch.Tensor:
    """Step the delta rule over time-major rows; ``state`` [B, V, dk, dv] is advanced in place.

    ``q`` and ``k`` [rows, V, dk], ``v`` [rows, V, dv], ``beta`` [rows, V, 1], ``decay`` [rows, V, 1, 1].
    Returns o [rows, V, dv].
    """
    rounded = cache.temporal.dtype != state.dtype
    out = torch.empty_like(v)
    first = 0
    for time, count in enumerate(counts):
        rows = slice(first, first + count)
        now = state[:count]
        now *= decay[rows]
        key = k[rows].unsqueeze(-1)  # [count, V, dk, 1]
        delta = (v[rows] - (now.transpose(-1, -2) @ key).squeeze(-1)) * beta[rows]
        now += key * delta.unsqueeze(-2)
        if rounded:
            now.copy_(now.to(cache.temporal.dtype))
        out[rows] = (q[rows].unsqueeze(-2) @ now).squeeze(-2)
        for place, target in due.get(time + 1, ()):
            cache.temporal[target] = state[place].view(cache.temporal.shape[1:]).to(cache.temporal.dtype)
        first += count
    return out


register(ReferenceBackend())
