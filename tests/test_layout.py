"""Inside of pages and states: offsets by hand, views that cover each byte once, contiguous shards."""

from __future__ import annotations

import pytest
import torch
from steps import nan_arena

from plait.core.geometry import ALIGNMENT
from plait.kernels.layout import CacheLayout, CacheViews, PageLayout, StateLayout

PAGE = PageLayout(page_size=32, num_layers=3, num_kv_heads=2, head_dim=40, dtype=torch.float32)
STATE = StateLayout(
    num_layers=2, num_groups=3, value_heads=2, key_dim=24, value_dim=40, conv_width=4,
    conv_dtype=torch.bfloat16, dtype=torch.float32,
)  # fmt: skip


def make_views(layout: CacheLayout, size: int = 4 << 20) -> CacheViews:
    return CacheViews(nan_arena(size), layout, layout.geometry(size, 1))


def test_offsets_of_keys_and_values() -> None:
    """One number of K and of V, found in the bytes by the drawing in the module's docstring."""
    views = make_views(CacheLayout(PAGE, STATE))
    page, head, layer, token, dim = 5, 1, 2, 29, 37
    views.attention[layer].k[page, head, token // 16, dim, token % 16] = 1.5
    views.attention[layer].v[page, head, token // 16, dim // 16, token % 16, dim % 16] = 2.5
    floats = views.arena.view(torch.float32)
    entry = 2 * 48 * 16  # blocks x padded head dimension x tokens of a block
    start = page * PAGE.page_bytes // 4 + (head * 3 + layer) * 2 * entry
    assert floats[start + (1 * 48 + 37) * 16 + 13] == 1.5
    assert floats[start + entry + ((1 * 3 + 2) * 16 + 13) * 16 + 5] == 2.5


def test_offsets_of_states() -> None:
    layout = CacheLayout(PAGE, STATE)
    views = make_views(layout)
    state, group, layer = 2, 1, 1
    views.recurrent[layer].conv[state, group, 2, 100] = 1.5
    views.recurrent[layer].temporal[state, group, 1, 23, 39] = 2.5
    conv_bytes = 3 * (24 + 24 + 2 * 40) * 2
    start = state * views.geometry.state_stride + group * STATE.group_bytes + layer * STATE.layer_bytes
    assert views.arena[start + (2 * 128 + 100) * 2 :][:2].view(torch.bfloat16) == 1.5
    assert views.arena[start + conv_bytes + ((1 * 24 + 23) * 40 + 39) * 4 :][:4].view(torch.float32) == 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_views_cover_each_byte_once(dtype: torch.dtype) -> None:
    """Filling every view of one unit writes all its bytes but padding, and none of its neighbours'."""
    page = PageLayout(page_size=16, num_layers=3, num_kv_heads=2, head_dim=24, dtype=dtype)
    layout = CacheLayout(page, STATE)
    views = make_views(layout)
    written = 0
    for cache in views.attention:
        for view in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            if view is not None:
                view[3].copy_(torch.zeros(view[3].shape))
                written += view[3].numel() * view.element_size()
    assert written == page.num_kv_heads * page.head_bytes == page.page_bytes
    assert (views.pages[3] == 0).all()
    views.pages[3] = 0xFF
    assert (views.arena == 0xFF).all()

    written = 0
    for state in views.recurrent:
        for view in (state.conv, state.temporal):
            view[4] = 0
            written += view[4].numel() * view.element_size()
    assert (views.states[4] == 0).sum() == written
    views.states[4] = 0xFF
    assert (views.arena == 0xFF).all()


def test_a_head_is_one_contiguous_range() -> None:
    """What a tensor-parallel rank owns of a page or a state is one run of bytes."""
    views = make_views(CacheLayout(PAGE, STATE))
    for cache in views.attention:
        cache.k[0, 1], cache.v[0, 1] = 0, 0
    for state in views.recurrent:
        state.conv[views.geometry.num_states - 1, 2], state.temporal[views.geometry.num_states - 1, 2] = 0, 0
    touched = torch.nonzero(views.pages[0] == 0).flatten()
    assert (touched[0], len(touched)) == (PAGE.head_bytes, PAGE.head_bytes)
    touched = torch.nonzero(views.states[-1] == 0).flatten()
    assert touched[0] == 2 * STATE.group_bytes
    assert touched[-1] < 3 * STATE.group_bytes


def test_bytes_of_quantised_pages() -> None:
    """One float32 scale per token and head, for K and for V."""
    page = PageLayout(page_size=32, num_layers=3, num_kv_heads=2, head_dim=64, dtype=torch.float8_e4m3fn)
    assert page.scale_bytes == 32 * 4
    assert page.page_bytes == 2 * 3 * 2 * 32 * (64 + 4)
    cache = make_views(CacheLayout(page)).attention[1]
    assert cache.k_scale is not None
    assert cache.k_scale.shape[1:] == (2, 32)
    assert PAGE.scale_bytes == 0


def test_sizes_are_aligned_and_geometry_follows() -> None:
    layout = CacheLayout(PAGE, STATE)
    geometry = layout.geometry(1 << 20, 64)
    assert (geometry.page_size, geometry.page_bytes) == (32, layout.page_bytes)
    assert (geometry.state_bytes, geometry.state_grid) == (layout.state_bytes, 64)
    assert layout.page_bytes % ALIGNMENT == layout.state_bytes % ALIGNMENT == 0
    assert CacheLayout(PAGE).geometry(1 << 20, 1).state_bytes == 0


def test_small_states_share_a_slab() -> None:
    """States smaller than a page lie several to a slab; their views follow the stride."""
    small = StateLayout(1, 1, 1, 8, 8, 2, torch.float32, torch.float32)
    views = make_views(CacheLayout(PAGE, small))
    assert views.geometry.slab_states > 1
    views.states[7] = 0
    assert (views.recurrent[0].temporal[7] == 0).all()
    assert views.recurrent[0].temporal[6].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 24}, "page_size=24: it must be a multiple of 16"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"dtype": torch.int32}, "KV cache dtype torch.int32 is unknown"),
    ],
)
def test_bad_page_layouts(changes: dict, message: str) -> None:
    fields = {"page_size": 16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        PageLayout(**{**fields, **changes})


def test_views_refuse_a_foreign_geometry_or_arena() -> None:
    layout, arena = CacheLayout(PAGE, STATE), nan_arena(1 << 20)
    with pytest.raises(ValueError, match="differ in state_bytes"):
        CacheViews(arena, layout, CacheLayout(PAGE).geometry(1 << 20, 1))
    with pytest.raises(ValueError, match="its geometry needs"):
        CacheViews(arena, layout, layout.geometry(4 << 20, 1))
    with pytest.raises(ValueError, match="contiguous uint8"):
        CacheViews(arena.view(torch.int8), layout, layout.geometry(1 << 20, 1))
