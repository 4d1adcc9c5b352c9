"""Everything between the projections: attention, recurrence, norms, experts. One native call for each.

The kernels are row-invariant (``csrc/mixer_kernels.hpp``): a token's arithmetic depends neither on its
neighbours in the batch, nor on chunks, threads or page size, and has the same bits on every instruction set.
Activations are float32. Pages may be quantised: one float32 scale per token and head, of K and of V::

    scale = max |x| / M,  entry = round(x / scale),  M = 448 (fp8 e4m3) or 127 (int8)
"""

from __future__ import annotations

import abc
import weakref
from typing import Any

import torch

from plait.kernels.backend import AttentionParams, Backend, DeltaParams, MoeParams, Packed
from plait.kernels.batch import Batch
from plait.kernels.cpu.native import native
from plait.kernels.cpu.views import (
    KV_DTYPES,
    STATE_DTYPES,
    at,
    at_or_null,
    batch_view,
    half_of,
    pages_view,
    states_view,
    taps_of,
    vector,
)
from plait.kernels.layout import BLOCK, AttentionCache, RecurrentCache


class MixerOps(Backend):
    """The part of the CPU backend that is not a matrix product with weights."""

    _last_batch: tuple[weakref.ref[Batch], Any] | None = None
    """The batch whose native view was made last: all layers of a step share it."""

    @abc.abstractmethod
    def expert_linear(
        self,
        x: torch.Tensor,
        experts: Packed,
        which: str,
        starts: torch.Tensor,
        sources: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows through the experts they visit.

        Args:
            x: float32 [T, K].
            experts: what ``pack_experts`` gave.
            which: "gate_up" or "down".
            starts: int64 [E + 1]; rows ``starts[e] : starts[e + 1]`` of the result are expert e's.
            sources: int64 [visits], the row of ``x`` that each row of the result is made from; None: its own.

        Returns:
            float32 [visits, N].
        """

    def supports_cache(
        self, kv_dtype: torch.dtype | None, state_dtype: torch.dtype | None, page_size: int | None
    ) -> str | None:
        """Why a kind of cache cannot be served, in words for a user; None when it can."""
        for what, asked, known in (
            ("KV cache dtype", kv_dtype, KV_DTYPES),
            ("state dtype", state_dtype, STATE_DTYPES),
        ):
            if asked is not None and asked not in known:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
                asked_name = str(asked).removeprefix("torch.")
                return f"{what} {asked_name} is not built in backend {self.name!r}; use one of {names}"
        if page_size is not None and (page_size < BLOCK or page_size % BLOCK):
            return f"page size {page_size} is not a multiple of {BLOCK}"
        return None

    # Rows

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // size
        native.rms_norm(at(x), size, 0, 0, 0, 0, vector(weight, size), eps, at(out), rows, size)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.shape[-1]
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        rows, w = x.numel() // size, vector(weight, size)
        native.rms_norm(at(x), size, at(residual), at(total), 0, 0, w, eps, at(out), rows, size)
        return out, total

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        size = x.shape[-1]
        x, gate = x.contiguous(), gate.contiguous()
        out = torch.empty_like(x)
        rows, w = x.numel() // size, vector(weight, size)
        native.rms_norm(at(x), size, 0, 0, at(gate), size, w, eps, at(out), rows, size)
        return out

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = x.shape
        x, half = x.contiguous(), half_of(cos, sin, tokens, dim)
        out = torch.empty_like(x)
        native.rotary(at(x), at(cos), at(sin), at(out), tokens, heads, dim, half)
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape[0], x.shape[1] // 2
        x = x.contiguous()
        out = x.new_empty((rows, size))
        native.silu_and_mul(at(x), at(out), rows, size)
        return out

    # Attention

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
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        gate = None if gate is None else gate.contiguous()
        out = q.new_empty((tokens, heads * dim))
        strides = heads * dim, kv_heads * dim, kv_heads * dim, heads * dim
        native.attention(
            self._view(batch, tokens), pages_view(cache, kv_heads, dim),
            at(q), at(k), at(v), at_or_null(gate), *strides, 0, 0, 0, 0, at(out), heads, 0, scale, 0.0,
        )  # fmt: skip
        return out

    def attention_mixer(
        self,
        projected: torch.Tensor,
        params: AttentionParams,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: AttentionCache,
        batch: Batch,
    ) -> torch.Tensor:
        tokens, width = projected.shape
        heads, dim = params.num_heads, params.head_dim
        queries, gates, keys, values = params.splits
        if width != queries + gates + keys + values:
            raise ValueError(f"projected rows have {width} columns; {params.splits} are needed")
        q, row = at(projected), projected.stride(0)
        gate = q + 4 * queries
        k = gate + 4 * gates
        q_norm, k_norm = (0 if n is None else vector(n, dim) for n in (params.q_norm, params.k_norm))
        half = half_of(cos, sin, tokens, dim)
        out = projected.new_empty((tokens, queries))
        native.attention(
            self._view(batch, tokens), pages_view(cache, params.num_kv_heads, dim), q, k, k + 4 * keys,
            gate if params.output_gate else 0, row, row, row, row, q_norm, k_norm, at(cos), at(sin),
            at(out), heads, half, params.scale, params.eps,
        )  # fmt: skip
        return out

    # Recurrence

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        tokens, channels = x.shape
        out = x.new_empty((tokens, channels))
        taps = taps_of(weight, channels, cache)
        native.conv(self._view(batch, tokens), states_view(cache), at(x), x.stride(0), taps, at(out))
        return out

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
        tokens, heads = b.shape
        out = qkv.new_empty((tokens, heads, cache.layout.value_dim))
        native.delta(
            self._view(batch, tokens), states_view(cache), at(qkv), at(b), at(a), 0,
            qkv.stride(0), b.stride(0), a.stride(0), 0, 0,
            vector(decay_rate, heads), vector(dt_bias, heads), 0, 0.0, at(out),
        )  # fmt: skip
        return out

    def delta_mixer(
        self, projected: torch.Tensor, params: DeltaParams, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        tokens, width = projected.shape
        channels, values, heads, _ = params.splits
        if width != channels + values + 2 * heads:
            raise ValueError(f"projected rows have {width} columns; {params.splits} are needed")
        qkv, row = at(projected), projected.stride(0)
        z = qkv + 4 * channels
        b = z + 4 * values
        out = projected.new_empty((tokens, values))
        native.delta(
            self._view(batch, tokens), states_view(cache), qkv, b, b + 4 * heads, z, row, row, row, row,
            taps_of(params.conv_weight, channels, cache), vector(params.decay_rate, heads),
            vector(params.dt_bias, heads), vector(params.norm, params.value_dim), params.eps, at(out),
        )  # fmt: skip
        return out

    # Experts

    def moe(self, x: torch.Tensor, params: MoeParams) -> torch.Tensor:
        rows, hidden = x.shape
        logits = self.linear(x, params.router)
        experts, top_k = logits.shape[1], params.top_k
        weights = x.new_empty((rows, top_k))
        places = torch.empty((rows, top_k), dtype=torch.int64)
        starts = torch.empty(experts + 1, dtype=torch.int64)
        sources = torch.empty(rows * top_k, dtype=torch.int64)
        native.route(
            at(logits), rows, experts, top_k, params.renormalise, at(weights),
            places.data_ptr(), starts.data_ptr(), sources.data_ptr(),
        )  # fmt: skip
        inner = self.silu_and_mul(self.expert_linear(x, params.experts, "gate_up", starts, sources))
        y = self.expert_linear(inner, params.experts, "down", starts, None)
        shared = gate = None
        if params.shared_gate_up is not None and params.shared_down is not None:
            shared = self.mlp(x, params.shared_gate_up, params.shared_down)
            if params.shared_gate is not None:
                gate = self.linear(x, params.shared_gate)
        out = x.new_empty((rows, hidden))
        native.combine(
            at(y), places.data_ptr(), at(weights), at_or_null(shared), at_or_null(gate), at(out),
            rows, top_k, hidden,
        )  # fmt: skip
        return out

    def _view(self, batch: Batch, tokens: int) -> Any:
        """The native view of a batch of ``tokens`` tokens."""
        last = self._last_batch
        if last is None or last[0]() is not batch:
            last = self._last_batch = (weakref.ref(batch), batch_view(batch))
        if batch.query_start_host[-1] != tokens:
            raise ValueError(f"the batch has {batch.query_start_host[-1]} tokens, its activations {tokens}")
        return last[1]
