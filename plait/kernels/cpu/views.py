"""What native code is given: addresses of tensors, and views of batches and caches.

It checks nothing, so shapes and types are checked here; whoever asks keeps the tensors alive.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from plait.kernels.batch import Batch
from plait.kernels.cpu.native import native
from plait.kernels.layout import AttentionCache, RecurrentCache

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


def batch_view(batch: Batch) -> Any:
    """The batch's arrays and exports."""
    arrays = (batch.query_start, batch.context_lens, batch.slots, batch.page_table)
    for array in arrays:
        if array.dtype != torch.int32 or array.stride(-1) != 1 or not array.is_cpu:
            raise ValueError(f"a batch's integers must be dense int32 on the CPU, not {array.dtype}")
    exports = [number for export in batch.exports for number in export]
    addresses = (array.data_ptr() for array in arrays)
    return native.BatchView(*addresses, batch.num_chunks, batch.page_table.stride(0), exports)


def pages_view(cache: AttentionCache, kv_heads: int, head_dim: int) -> Any:
    """One attention layer over all pages."""
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


def states_view(cache: RecurrentCache) -> Any:
    """One recurrent layer over all states."""
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


def at(x: torch.Tensor) -> int:
    """The address of float32 rows."""
    if x.dtype is not torch.float32 or not x.is_cpu or (x.stride(-1) != 1 and x.numel() > 1):
        found = f"{x.dtype} on {x.device} with strides {x.stride()}"
        raise ValueError(f"the CPU kernels take float32 rows of consecutive numbers, not {found}")
    return x.data_ptr()


def at_or_null(x: torch.Tensor | None) -> int:
    return 0 if x is None else at(x)


def vector(x: torch.Tensor, size: int) -> int:
    """The address of float32 [size]."""
    if x.dim() != 1 or x.shape[0] != size:
        raise ValueError(f"a vector of {size} numbers is needed, not {list(x.shape)}")
    return at(x)


def half_of(cos: torch.Tensor, sin: torch.Tensor, tokens: int, dim: int) -> int:
    """Checks cos and sin [tokens, half]; returns half."""
    half = cos.shape[-1]
    if cos.shape != (tokens, half) or sin.shape != cos.shape or 2 * half > dim:
        shapes = f"{list(cos.shape)} and {list(sin.shape)}"
        raise ValueError(f"cos and sin are {shapes}; {tokens} tokens of heads of {dim} do not fit")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous")
    return half


def taps_of(weight: torch.Tensor, channels: int, cache: RecurrentCache) -> int:
    """The address of the convolution's weight, [channels, width]."""
    width = cache.layout.conv_width
    if weight.shape != (channels, width) or not weight.is_contiguous() or width > native.most_taps:
        needed = f"[{channels}, {width}], contiguous, with at most {native.most_taps} taps"
        raise ValueError(f"the convolution's weight is {list(weight.shape)}; {needed} is needed")
    return at(weight)
