"""Everything between the projections: attention, recurrence, norms, experts. One native call for each.

The kernels are row-invariant (``csrc/mixer_kernels.hpp``): a token's arithmetic depends neither on its
neighbours in the batch, nor on chunks, threads or page size, and has the same bits on every instruction set.
Activations are float32. Pages may be quantised: one float32 scale per token and head, of K and of V::

    scale = max |x| / M,  entry = round(x / scale),  M = 448 (fp8 e4m3) or 127 (int8)

Native code checks nothing, so what it is given is checked here.
"""

from __future__ import annotations

import abc
import functools
import weakref
from typing import Any

import torch

from plait.kernels.backend import AttentionParams, Backend, DeltaParams, MoeParams, Packed
from plait.kernels.batch import Batch
from plait.kernels.cpu.native import native
from plait.kernels.layout import BLOCK, AttentionCache, RecurrentCache

_FORMATS = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "int8",
}
KV_DTYPES = tuple(_FORMATS)
"""Of pages."""
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the temporal state."""


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
        native.rms_norm(_at(x), size, 0, 0, 0, 0, _vector(weight, size), eps, _at(out), rows, size)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.shape[-1]
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        rows, w = x.numel() // size, _vector(weight, size)
        native.rms_norm(_at(x), size, _at(residual), _at(total), 0, 0, w, eps, _at(out), rows, size)
        return out, total

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        size = x.shape[-1]
        x, gate = x.contiguous(), gate.contiguous()
        out = torch.empty_like(x)
        rows, w = x.numel() // size, _vector(weight, size)
        native.rms_norm(_at(x), size, 0, 0, _at(gate), size, w, eps, _at(out), rows, size)
        return out

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = x.shape
        x, half = x.contiguous(), _half(cos, sin, tokens, dim)
        out = torch.empty_like(x)
        native.rotary(_at(x), _at(cos), _at(sin), _at(out), tokens, heads, dim, half)
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape[0], x.shape[1] // 2
        x = x.contiguous()
        out = x.new_empty((rows, size))
        native.silu_and_mul(_at(x), _at(out), rows, size)
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
            self._view(batch, tokens), _pages(cache, kv_heads, dim),
            _at(q), _at(k), _at(v), _at_or_null(gate), *strides, 0, 0, 0, 0, _at(out), heads, 0, scale, 0.0,
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
        q, row = _at(projected), projected.stride(0)
        gate = q + 4 * queries
        k = gate + 4 * gates
        q_norm, k_norm = (0 if n is None else _vector(n, dim) for n in (params.q_norm, params.k_norm))
        half = _half(cos, sin, tokens, dim)
        out = projected.new_empty((tokens, queries))
        native.attention(
            self._view(batch, tokens), _pages(cache, params.num_kv_heads, dim), q, k, k + 4 * keys,
            gate if params.output_gate else 0, row, row, row, row, q_norm, k_norm, _at(cos), _at(sin),
            _at(out), heads, half, params.scale, params.eps,
        )  # fmt: skip
        return out

    # Recurrence

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        tokens, channels = x.shape
        out = x.new_empty((tokens, channels))
        taps = _taps(weight, channels, cache)
        native.conv(self._view(batch, tokens), _states(cache), _at(x), x.stride(0), taps, _at(out))
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
            self._view(batch, tokens), _states(cache), _at(qkv), _at(b), _at(a), 0,
            qkv.stride(0), b.stride(0), a.stride(0), 0, 0,
            _vector(decay_rate, heads), _vector(dt_bias, heads), 0, 0.0, _at(out),
        )  # fmt: skip
        return out

    def delta_mixer(
        self, projected: torch.Tensor, params: DeltaParams, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        tokens, width = projected.shape
        channels, values, heads, _ = params.splits
        if width != channels + values + 2 * heads:
            raise ValueError(f"projected rows have {width} columns; {params.splits} are needed")
        qkv, row = _at(projected), projected.stride(0)
        z = qkv + 4 * channels
        b = z + 4 * values
        out = projected.new_empty((tokens, values))
        native.delta(
            self._view(batch, tokens), _states(cache), qkv, b, b + 4 * heads, z, row, row, row, row,
            _taps(params.conv_weight, channels, cache), _vector(params.decay_rate, heads),
            _vector(params.dt_bias, heads), _vector(params.norm, params.value_dim), params.eps, _at(out),
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
            _at(logits), rows, experts, top_k, params.renormalise, _at(weights),
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
            _at(y), places.data_ptr(), _at(weights), _at_or_null(shared), _at_or_null(gate), _at(out),
            rows, top_k, hidden,
        )  # fmt: skip
        return out

    def _view(self, batch: Batch, tokens: int) -> Any:
        """The native view of a batch of ``tokens`` tokens."""
        last = self._last_batch
        if last is None or last[0]() is not batch:
            last = self._last_batch = (weakref.ref(batch), _batch_view(batch))
        if batch.query_start_host[-1] != tokens:
            raise ValueError(f"the batch has {batch.query_start_host[-1]} tokens, its activations {tokens}")
        return last[1]


def _batch_view(batch: Batch) -> Any:
    arrays = (batch.query_start, batch.context_lens, batch.slots, batch.page_table)
    for array in arrays:
        if array.dtype != torch.int32 or array.stride(-1) != 1 or not array.is_cpu:
            raise ValueError(f"a batch's integers must be dense int32 on the CPU, not {array.dtype}")
    exports = [number for export in batch.exports for number in export]
    addresses = (array.data_ptr() for array in arrays)
    return native.BatchView(*addresses, batch.num_chunks, batch.page_table.stride(0), exports)


def _pages(cache: AttentionCache, kv_heads: int, head_dim: int) -> Any:
    k, layout = cache.k, cache.layout
    if (k.shape[1], layout.head_dim) != (kv_heads, head_dim) or head_dim > native.largest_head:
        raise ValueError(
            f"{kv_heads} heads of {head_dim} numbers do not fit a cache of {k.shape[1]} heads of "
            f"{layout.head_dim}, or heads are larger than {native.largest_head}"
        )
    size = k.element_size()
    scales = (0, 0) if cache.k_scale is None or cache.v_scale is None else (
        cache.k_scale.data_ptr(), cache.v_scale.data_ptr()
    )  # fmt: skip
    return native.PagesView(
        k.data_ptr(), cache.v.data_ptr(), *scales, k.stride(0) * size, k.stride(1) * size,
        layout.page_size, kv_heads, head_dim, _native_format(layout.dtype),
    )  # fmt: skip


def _states(cache: RecurrentCache) -> Any:
    conv, temporal, layout = cache.conv, cache.temporal, cache.layout
    if conv.dtype != torch.float32:
        raise ValueError(f"conv columns are {conv.dtype}; the CPU kernels keep them in float32")
    size = temporal.element_size()
    return native.StatesView(
        conv.data_ptr(), temporal.data_ptr(), temporal.stride(0) * size, temporal.stride(1) * size,
        temporal.shape[1], layout.value_heads, layout.key_dim, layout.value_dim, layout.conv_width,
        _native_format(temporal.dtype),
    )  # fmt: skip


def _native_format(dtype: torch.dtype) -> Any:
    known = _native_formats()
    if dtype not in known:
        raise ValueError(f"the CPU kernels have no caches of {dtype}")
    return known[dtype]


@functools.cache
def _native_formats() -> dict[torch.dtype, Any]:
    return {dtype: getattr(native.CacheFormat, name) for dtype, name in _FORMATS.items()}


def _at(x: torch.Tensor) -> int:
    """The address of float32 rows."""
    if x.dtype is not torch.float32 or not x.is_cpu or (x.stride(-1) != 1 and x.numel() > 1):
        found = f"{x.dtype} on {x.device} with strides {x.stride()}"
        raise ValueError(f"the CPU kernels take float32 rows of consecutive numbers, not {found}")
    return x.data_ptr()


def _at_or_null(x: torch.Tensor | None) -> int:
    return 0 if x is None else _at(x)


def _vector(x: torch.Tensor, size: int) -> int:
    """The address of float32 [size]."""
    if x.dim() != 1 or x.shape[0] != size:
        raise ValueError(f"a vector of {size} numbers is needed, not {list(x.shape)}")
    return _at(x)


def _half(cos: torch.Tensor, sin: torch.Tensor, tokens: int, dim: int) -> int:
    """Checks cos and sin [tokens, half]; returns half."""
    half = cos.shape[-1]
    if cos.shape != (tokens, half) or sin.shape != cos.shape or 2 * half > dim:
        shapes = f"{list(cos.shape)} and {list(sin.shape)}"
        raise ValueError(f"cos and sin are {shapes}; {tokens} tokens of heads of {dim} do not fit")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous")
    return half


def _taps(weight: torch.Tensor, channels: int, cache: RecurrentCache) -> int:
    """The address of the convolution's weight, [channels, width]."""
    width = cache.layout.conv_width
    if weight.shape != (channels, width) or not weight.is_contiguous() or width > native.most_taps:
        needed = f"[{channels}, {width}], contiguous, with at most {native.most_taps} taps"
        raise ValueError(f"the convolution's weight is {list(weight.shape)}; {needed} is needed")
    return _at(weight)
