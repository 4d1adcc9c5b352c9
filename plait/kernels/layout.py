"""Where every byte of a page and of a state slot lies, and torch views onto the arena.

The arena is cut by ``plait.core.geometry``; this module says what is inside a unit.

A page holds the keys and values of all attention layers for ``page_size`` tokens, head-major, so that
a tensor-parallel shard of a page is one contiguous range::

    page     | kv head 0                      | kv head 1                      | ...
    kv head  | layer 0 | layer 1 | ...        |
    layer    | K             | V              | K scales | V scales |     (scales: quantised only)
    K        | block 0: [D][16 tokens]        | block 1 | ...             page_size / 16 blocks
    V        | block 0: [D/16][16 tokens][16] | block 1 | ...
    scales   | float32 [page_size]            |

``D`` is the head dimension rounded up to a multiple of 16; the added lanes hold zeros for each token
written. A block of 16 tokens is thus a matrix-multiplication panel for both products of attention.

A slot holds the state of all recurrent layers of one request, grouped by key head with the value heads
it serves::

    slot     | key-head group 0               | key-head group 1               | ...
    group    | layer 0 | layer 1 | ...        |
    layer    | conv                           | temporal                       |   each padded to 64 bytes
    conv     | oldest column: q, k, v | ... | newest column: q, k, v |       width - 1 columns
    temporal | value head 0 of the group: [dk][dv] | value head 1 | ...

Conv columns are the inputs of the convolution (before it, not after); a column holds ``dk`` numbers of
q, ``dk`` of k and ``value_heads * dv`` of v. Columns before the first token are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.core.geometry import ALIGNMENT, Geometry, round_up

BLOCK = 16
"""Tokens of a block, and lanes of a V panel."""

SCALE_DTYPE = torch.float32

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Cache dtypes that need no scale; float64 serves tests."""

QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Inside of a page. Sizes are in bytes unless said.

    Args:
        page_size: tokens per page, a multiple of 16.
        num_layers: attention layers.
        num_kv_heads: key-value heads of each layer.
        head_dim: numbers per head of K, and of V.
        dtype: of the entries; fp8 and int8 bring one float32 scale per token and head, for K and for V.
    """

    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.page_size < BLOCK or self.page_size % BLOCK:
            raise ValueError(f"page_size={self.page_size}: it must be a multiple of {BLOCK} from {BLOCK} up")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be from 1 up")
        if self.dtype not in PLAIN_DTYPES + QUANTISED_DTYPES:
            known = ", ".join(str(dtype) for dtype in PLAIN_DTYPES + QUANTISED_DTYPES)
            raise ValueError(f"KV cache dtype {self.dtype} is unknown; choose one of {known}")

    @property
    def quantised(self) -> bool:
        return self.dtype in QUANTISED_DTYPES

    @property
    def blocks(self) -> int:
        """Blocks of 16 tokens in a page."""
        return self.page_size // BLOCK

    @property
    def padded_dim(self) -> int:
        """Head dimension in storage."""
        return round_up(self.head_dim, BLOCK)

    @property
    def entry_bytes(self) -> int:
        """K (or V) of one layer and head, without scales."""
        return self.page_size * self.padded_dim * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Scales of K (or V) of one layer and head: one per token; 0 unless quantised."""
        return self.page_size * SCALE_DTYPE.itemsize if self.quantised else 0

    @property
    def layer_bytes(self) -> int:
        """K, V and their scales of one layer and head."""
        return 2 * (self.entry_bytes + self.scale_bytes)

    @property
    def head_bytes(self) -> int:
        """All layers of one head: what one shard of a page is made of."""
        return self.num_layers * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        return round_up(self.num_kv_heads * self.head_bytes, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Inside of a state slot. Sizes are in bytes unless said.

    Args:
        num_layers: recurrent layers.
        num_groups: key heads; each forms a group with the value heads it serves.
        value_heads: value heads per group.
        key_dim: dk, numbers per key head.
        value_dim: dv, numbers per value head.
        conv_width: taps of the causal convolution; the state keeps one column less.
        conv_dtype: of the conv columns (the activations' dtype loses nothing).
        dtype: of the temporal state.
    """

    num_layers: int
    num_groups: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    conv_dtype: torch.dtype
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_groups", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be from 1 up")
        if self.conv_width < 2:
            raise ValueError(f"conv_width={self.conv_width}: it must be from 2 up")
        for name in ("conv_dtype", "dtype"):
            if getattr(self, name) not in PLAIN_DTYPES:
                known = ", ".join(str(dtype) for dtype in PLAIN_DTYPES)
                raise ValueError(f"state {name} {getattr(self, name)} is unknown; choose one of {known}")

    @property
    def column_splits(self) -> list[int]:
        """Numbers of q, of k and of v in one conv column of a group."""
        return [self.key_dim, self.key_dim, self.value_heads * self.value_dim]

    @property
    def group_channels(self) -> int:
        """Numbers in one conv column of a group."""
        return sum(self.column_splits)

    @property
    def conv_columns(self) -> int:
        return self.conv_width - 1

    @property
    def conv_bytes(self) -> int:
        """Conv state of one layer and group, padded."""
        return round_up(self.conv_columns * self.group_channels * self.conv_dtype.itemsize, ALIGNMENT)

    @property
    def temporal_bytes(self) -> int:
        """Temporal state of one layer and group, padded."""
        return round_up(self.value_heads * self.key_dim * self.value_dim * self.dtype.itemsize, ALIGNMENT)

    @property
    def layer_bytes(self) -> int:
        return self.conv_bytes + self.temporal_bytes

    @property
    def group_bytes(self) -> int:
        """All layers of one group: what one shard of a slot is made of."""
        return self.num_layers * self.layer_bytes

    @property
    def state_bytes(self) -> int:
        return self.num_groups * self.group_bytes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Inside of both kinds of unit; ``state`` is None for a model without recurrent layers."""

    page: PageLayout
    state: StateLayout | None = None

    @property
    def page_size(self) -> int:
        return self.page.page_size

    @property
    def page_bytes(self) -> int:
        return self.page.page_bytes

    @property
    def state_bytes(self) -> int:
        return self.state.state_bytes if self.state else 0

    def geometry(self, arena_bytes: int, state_grid: int) -> Geometry:
        """How an arena of ``arena_bytes`` is cut for this layout."""
        return Geometry(
            page_size=self.page_size,
            page_bytes=self.page_bytes,
            state_bytes=self.state_bytes,
            state_grid=state_grid,
            arena_bytes=arena_bytes,
        )


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """Views of one attention layer over all pages of the arena.

    ``k``: [num_pages, kv_heads, blocks, D, 16 tokens]; ``v``: [num_pages, kv_heads, blocks, D/16, 16
    tokens, 16 lanes]. ``k_scale`` and ``v_scale``: float32 [num_pages, kv_heads, page_size], quantised only.
    """

    layout: PageLayout
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """Views of one recurrent layer over all state units of the arena.

    ``conv``: [num_states, groups, width - 1 columns, channels]; ``temporal``: [num_states, groups, value
    heads of the group, dk, dv].
    """

    layout: StateLayout
    conv: torch.Tensor
    temporal: torch.Tensor


class CacheViews:
    """Typed views onto an arena, made once.

    Args:
        arena: uint8 [at least num_slabs * slab_bytes], contiguous, its address a multiple of 64.
        layout: what is inside a unit.
        geometry: how the arena is cut; it must come from the same layout.

    Attributes:
        attention: one ``AttentionCache`` per attention layer, in the model's order.
        recurrent: one ``RecurrentCache`` per recurrent layer, in the model's order.
        pages: uint8 [num_pages, page_bytes], for copying whole pages.
        states: uint8 [num_states, state_bytes], for copying whole states (empty without recurrent layers).

    Raises:
        ValueError: the arena is not such a tensor, or layout and geometry differ.
    """

    def __init__(self, arena: torch.Tensor, layout: CacheLayout, geometry: Geometry) -> None:
        _check(arena, layout, geometry)
        self.arena = arena
        self.layout = layout
        self.geometry = geometry
        page = layout.page
        self.pages = _view(arena, torch.uint8, 0, (geometry.num_pages, page.page_bytes), (page.page_bytes, 1))
        self.attention = tuple(self._attention(index) for index in range(page.num_layers))
        if layout.state is None:
            self.states = arena.new_empty((0, 0))
            self.recurrent: tuple[RecurrentCache, ...] = ()
            return
        sizes, stride = (geometry.num_states, layout.state_bytes), geometry.state_stride
        self.states = _view(arena, torch.uint8, 0, sizes, (stride, 1))
        self.recurrent = tuple(self._recurrent(layout.state, i) for i in range(layout.state.num_layers))

    def _attention(self, index: int) -> AttentionCache:
        page, geometry = self.layout.page, self.geometry
        start = index * page.layer_bytes
        outer = (geometry.num_pages, page.num_kv_heads)
        strides = (page.page_bytes, page.head_bytes)
        size = page.dtype.itemsize
        lane, row, block = size, BLOCK * size, BLOCK * page.padded_dim * size
        k = _view(
            self.arena, page.dtype, start,
            (*outer, page.blocks, page.padded_dim, BLOCK), (*strides, block, row, lane),
        )  # fmt: skip
        v = _view(
            self.arena, page.dtype, start + page.entry_bytes,
            (*outer, page.blocks, page.padded_dim // BLOCK, BLOCK, BLOCK),
            (*strides, block, BLOCK * row, row, lane),
        )  # fmt: skip
        if not page.quantised:
            return AttentionCache(page, k, v)
        scales = start + 2 * page.entry_bytes
        shape, step = (*outer, page.page_size), (*strides, SCALE_DTYPE.itemsize)
        k_scale = _view(self.arena, SCALE_DTYPE, scales, shape, step)
        v_scale = _view(self.arena, SCALE_DTYPE, scales + page.scale_bytes, shape, step)
        return AttentionCache(page, k, v, k_scale, v_scale)

    def _recurrent(self, state: StateLayout, index: int) -> RecurrentCache:
        start = index * state.layer_bytes
        outer = (self.geometry.num_states, state.num_groups)
        strides = (self.geometry.state_stride, state.group_bytes)
        size = state.conv_dtype.itemsize
        conv = _view(
            self.arena, state.conv_dtype, start,
            (*outer, state.conv_columns, state.group_channels), (*strides, state.group_channels * size, size),
        )  # fmt: skip
        size, row = state.dtype.itemsize, state.value_dim * state.dtype.itemsize
        temporal = _view(
            self.arena, state.dtype, start + state.conv_bytes,
            (*outer, state.value_heads, state.key_dim, state.value_dim),
            (*strides, state.key_dim * row, row, size),
        )  # fmt: skip
        return RecurrentCache(state, conv, temporal)


def _check(arena: torch.Tensor, layout: CacheLayout, geometry: Geometry) -> None:
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        found = f"{arena.dtype} {list(arena.shape)}"
        raise ValueError(f"the arena must be a contiguous uint8 vector, not {found}")
    if arena.data_ptr() % ALIGNMENT:
        raise ValueError(f"the arena's address must be a multiple of {ALIGNMENT}")
    needed = geometry.num_slabs * geometry.slab_bytes
    if arena.numel() < needed:
        raise ValueError(f"the arena has {arena.numel()} bytes; its geometry needs {needed}")
    for name in ("page_size", "page_bytes", "state_bytes"):
        ours, theirs = getattr(layout, name), getattr(geometry, name)
        if ours != theirs:
            raise ValueError(
                f"layout and geometry differ in {name}: {ours} and {theirs}; "
                "make the geometry with layout.geometry(...)"
            )


def _view(
    arena: torch.Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Elements of ``dtype`` from byte ``start`` on; ``strides`` in bytes, as Python integers: no overflow."""
    size = dtype.itemsize
    usable = arena[: arena.numel() // ALIGNMENT * ALIGNMENT].view(dtype)
    if any(count == 0 for count in shape):
        return usable.new_empty(shape)
    steps = tuple(stride // size for stride in strides)
    return usable.as_strided(shape, steps, usable.storage_offset() + start // size)
