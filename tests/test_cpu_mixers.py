"""The CPU backend's attention, recurrence, norms and experts: equal bits whatever surrounds a token.

Each request is computed once, whole and alone; every other way to compute it (cut anywhere, among others, on
other pages, with two threads, on another instruction set) must give the same bits. Arenas hold NaN first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import make_batch, nan_arena

from plait.kernels.backend import AttentionParams, Backend, DeltaParams, MoeParams
from plait.kernels.cpu.native import MISSING, native
from plait.kernels.layout import (
    AttentionCache,
    CacheLayout,
    CacheViews,
    PageLayout,
    RecurrentCache,
    StateLayout,
)
from plait.kernels.registry import get_backend

pytestmark = pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}")

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = native.isas() if native else []


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    isa = native.isa()
    native.set_threads(1)
    yield
    native.set_threads(1)
    native.use_isa(isa)


@contextmanager
def on(isa: str | None = None, threads: int = 1) -> Iterator[None]:
    before = native.isa()
    native.use_isa(isa or before)
    native.set_threads(threads)
    try:
        yield
    finally:
        native.use_isa(before)
        native.set_threads(1)


def cpu() -> Backend:
    return get_backend("cpu")


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.isfinite(ours.float()).all()
    assert torch.equal(ours, theirs)


def near(ours: torch.Tensor, truth: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(ours).all()
    assert (ours.double() - truth).abs().max() / truth.abs().max() < tolerance


def cuts_of(length: int, draw: random.Random, pieces: int) -> list[int]:
    """Ends of chunks."""
    return [*sorted(draw.sample(range(1, length), min(pieces, length) - 1)), length]


# Attention


@dataclass
class Heads:
    """An attention layer and requests for it."""

    params: AttentionParams
    inputs: list[torch.Tensor]  # projected rows of each request
    angles: torch.Tensor  # by position

    @classmethod
    def draw(cls, lengths: Sequence[int], heads: int = 6, kv_heads: int = 2, dim: int = 24) -> Heads:
        norms = 1 + torch.randn(2, dim) / 4
        params = AttentionParams(heads, kv_heads, dim, dim**-0.5, 1e-6, norms[0], norms[1], output_gate=True)
        rows = [torch.randn(length, sum(params.splits)) for length in lengths]
        return cls(params, rows, torch.rand(max(lengths), max(1, dim // 8)) * 6)

    def cache(self, dtype: torch.dtype, page_size: int, pages: int) -> AttentionCache:
        layout = CacheLayout(PageLayout(page_size, 2, self.params.num_kv_heads, self.params.head_dim, dtype))
        arena = nan_arena(-(-layout.page_bytes * pages // 64) * 64)
        return CacheViews(arena, layout, layout.geometry(len(arena), 1)).attention[1]

    def run(
        self,
        cuts: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        cache: AttentionCache | None = None,
    ) -> list[torch.Tensor]:
        """Each request to its end, in chunks that end where ``cuts`` says; step by step, side by side."""
        draw = random.Random(1)
        counts = [-(-len(rows) // page_size) for rows in self.inputs]
        cache = cache or self.cache(dtype, page_size, sum(counts) + 2)
        free = list(range(cache.k.shape[0]))
        draw.shuffle(free)
        tables = [[free.pop() for _ in range(count)] for count in counts]
        out: list[list[torch.Tensor]] = [[] for _ in self.inputs]
        for number in range(max(map(len, cuts))):
            live = [r for r, ends in enumerate(cuts) if number < len(ends)]
            draw.shuffle(live)
            spans = [(r, (0, *cuts[r])[number], cuts[r][number]) for r in live]
            batch = make_batch([([0] * (last - first), first, tables[r], 0) for r, first, last in spans])
            rows = torch.cat([self.inputs[r][first:last] for r, first, last in spans])
            angles = torch.cat([self.angles[first:last] for _, first, last in spans])
            mixed = cpu().attention_mixer(rows, self.params, angles.cos(), angles.sin(), cache, batch)
            sizes = [last - first for _, first, last in spans]
            for (r, _, _), part in zip(spans, mixed.split(sizes), strict=True):
                out[r].append(part)
        return [torch.cat(parts) for parts in out]

    def truth(self, request: int, dtype: torch.dtype) -> torch.Tensor:
        """In float64, keys and values rounded as storage rounds them."""
        p, rows = self.params, self.inputs[request]
        q, gate, k, v = rows.split(p.splits, dim=-1)
        angles = self.angles[: len(rows)]
        q, k = (
            naive.rotary(
                naive.rms_norm(x.unflatten(-1, (-1, p.head_dim)), w, p.eps), angles.cos(), angles.sin()
            )
            for x, w in ((q, p.q_norm), (k, p.k_norm))
        )
        k, v = (stored(x.float(), dtype) for x in (k, v.unflatten(-1, (-1, p.head_dim))))
        return naive.attention(q, k, v, p.scale) * torch.sigmoid(gate.double())


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True) / (448.0 if dtype == torch.float8_e4m3fn else 127.0)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [T, heads, D] as they come back from a cache."""
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        return x.to(dtype).float()
    scale = scale_of(x, dtype)
    entries = x / scale
    return (entries.to(dtype) if dtype == torch.float8_e4m3fn else entries.round()).float() * scale


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_is_right(dtype: torch.dtype) -> None:
    heads = Heads.draw((70, 3))
    for request, ours in enumerate(heads.run([[70], [3]], dtype)):
        # Rounding to few bits may go the other way where a key differs in its last bit.
        near(ours, heads.truth(request, dtype), 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_cut_at_every_position(dtype: torch.dtype) -> None:
    heads = Heads.draw((150,))
    whole = heads.run([[150]], dtype)[0]
    for cut in range(1, 150):
        same(heads.run([[cut, 150]], dtype)[0], whole)
    same(heads.run([list(range(1, 151))], dtype)[0], whole)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
def test_attention_in_any_company(dtype: torch.dtype, page_size: int) -> None:
    """Long and short requests side by side in ragged chunks; pages of any size; two threads."""
    lengths = (1, 700, 16, 90, 33)
    heads = Heads.draw(lengths)
    alone = [replace(heads, inputs=[rows]).run([[len(rows)]], dtype)[0] for rows in heads.inputs]
    for seed in range(3):
        draw = random.Random(seed)
        cuts = [cuts_of(length, draw, draw.randint(1, 9)) for length in lengths]
        with on(threads=1 + seed % 2):
            for ours, theirs in zip(heads.run(cuts, dtype, page_size), alone, strict=True):
                same(ours, theirs)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_long_contexts_split_between_threads(dtype: torch.dtype) -> None:
    """Decoding past several partial sums of 512 keys, which two threads compute apart."""
    heads = Heads.draw((1600,), heads=8, kv_heads=1, dim=64)
    whole = heads.run([[1600]], dtype)[0]
    ends = [1500, *range(1530, 1545), 1600]
    for threads in (1, 2, 3):
        with on(threads=threads):
            same(heads.run([ends], dtype, 64)[0], whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_on_every_instruction_set(isa: str, dtype: torch.dtype) -> None:
    heads = Heads.draw((130, 20), heads=5, kv_heads=1, dim=40)
    with on("baseline"):
        expected = heads.run([[130], [20]], dtype)
    with on(isa):
        for ours, theirs in zip(heads.run([[7, 100, 130], [19, 20]], dtype), expected, strict=True):
            same(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(
    group=st.integers(1, 9), kv_heads=st.integers(1, 3), dim=st.integers(1, 256), seed=st.integers(0, 999),
    dtype=st.sampled_from(KV_DTYPES), page_size=st.sampled_from([16, 32, 80]),
)  # fmt: skip
def test_attention_of_any_shape(
    group: int, kv_heads: int, dim: int, seed: int, dtype: torch.dtype, page_size: int
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    dim = max(2, dim)
    heads = Heads.draw((33, 5), heads=group * kv_heads, kv_heads=kv_heads, dim=dim)
    whole = heads.run([[33], [5]], dtype)
    cuts = [cuts_of(33, draw, 4), cuts_of(5, draw, 2)]
    for request, ours in enumerate(heads.run(cuts, dtype, page_size)):
        same(ours, whole[request])
    if dtype == torch.float32:
        near(whole[1], heads.truth(1, dtype), 1e-5)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_stored_entries_and_scales(dtype: torch.dtype) -> None:
    """Exactly the documented formula; added lanes hold zeros; nothing else is touched."""
    layout = CacheLayout(PageLayout(32, 1, 2, 24, dtype))
    arena = nan_arena(layout.page_bytes * 3)
    cache = CacheViews(arena, layout, layout.geometry(len(arena), 1)).attention[0]
    q, k, v = torch.randn(20, 4, 24), torch.randn(20, 2, 24), torch.randn(20, 2, 24)
    k[3, 0] = 0
    k[4, 1] *= 1e-3
    v[:, :, 5] *= torch.logspace(-6, 3, 20)[:, None]
    cpu().paged_attention(q, k, v, cache, make_batch([([0] * 20, 0, [1], 0)]), scale=0.2)
    for view, scales, x in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
        page = view[1]
        if view is cache.k:  # [heads, blocks, D, 16] -> [tokens, heads, D]
            entries = page.permute(1, 3, 0, 2).flatten(0, 1)
        else:  # [heads, blocks, D / 16, 16 tokens, 16] -> [tokens, heads, D]
            entries = page.permute(1, 3, 0, 2, 4).flatten(3).flatten(0, 1)
        entries = entries[:20].float()
        assert not entries[:, :, 24:].any()
        if scales is None:
            assert torch.equal(entries[:, :, :24], x.to(dtype).float())
            continue
        scale = scale_of(x, dtype)
        assert torch.equal(scales[1, :, :20].T, scale[:, :, 0])
        exact = torch.where(scale > 0, x / scale, 0)
        exact = exact.to(dtype) if dtype == torch.float8_e4m3fn else exact.round()
        assert torch.equal(entries[:, :, :24], exact.float())
        assert scales[1, :, 20:].isnan().all()
    for page in (0, 2):
        assert (arena[page * layout.page_bytes : (page + 1) * layout.page_bytes] == 0xFF).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_keys_are_not_hidden(dtype: torch.dtype, poison: float) -> None:
    heads = Heads.draw((5,))
    heads.inputs[0][2, -1] = poison  # the last number of v
    out = heads.run([[5]], dtype)[0]
    assert out[2:].isnan().any(dim=-1).all()
    assert torch.isfinite(out[:2]).all()


def test_fused_attention_is_its_parts() -> None:
    heads = Heads.draw((40,))
    cos, sin = heads.angles[:40].cos(), heads.angles[:40].sin()
    batch = make_batch([([0] * 40, 0, [2, 0, 1], 0)])
    cache = heads.cache(torch.float32, 16, 3)
    fused = cpu().attention_mixer(heads.inputs[0], heads.params, cos, sin, cache, batch)
    same(fused, Backend.attention_mixer(cpu(), heads.inputs[0], heads.params, cos, sin, cache, batch))


# Recurrence


@dataclass
class Recurrence:
    """A Gated DeltaNet layer and requests for it."""

    params: DeltaParams
    width: int
    inputs: list[torch.Tensor]  # projected rows of each request

    @classmethod
    def draw(
        cls,
        lengths: Sequence[int],
        groups: int = 3,
        value_heads: int = 2,
        dk: int = 24,
        dv: int = 40,
        width: int = 4,
    ) -> Recurrence:
        channels, heads = groups * (2 * dk + value_heads * dv), groups * value_heads
        params = DeltaParams(
            groups, value_heads, dk, dv, torch.randn(channels, width), -torch.rand(heads), torch.randn(heads),
            1 + torch.randn(dv) / 4,
        )  # fmt: skip
        return cls(params, width, [torch.randn(length, sum(params.splits)) for length in lengths])

    def cache(self, dtype: torch.dtype = torch.float32, states: int = 64) -> RecurrentCache:
        p = self.params
        state = StateLayout(
            2, p.groups, p.value_heads, p.key_dim, p.value_dim, self.width, torch.float32, dtype
        )
        layout = CacheLayout(PageLayout(16, 1, 1, 16, torch.float32), state)
        arena = nan_arena(layout.geometry(0, 1).slab_bytes * states)
        return CacheViews(arena, layout, layout.geometry(len(arena), 1)).recurrent[1]

    def run(
        self,
        cuts: Sequence[Sequence[int]],
        cache: RecurrentCache,
        exports: Sequence[dict[int, int]] = (),
    ) -> list[torch.Tensor]:
        """As ``Heads.run``; request r lives in slot r. ``exports``: for each request, tokens to target."""
        draw = random.Random(1)
        out: list[list[torch.Tensor]] = [[] for _ in self.inputs]
        for number in range(max(map(len, cuts))):
            live = [r for r, ends in enumerate(cuts) if number < len(ends)]
            draw.shuffle(live)
            spans = [(r, (0, *cuts[r])[number], cuts[r][number]) for r in live]
            asked = [
                (chunk, tokens - first, target)
                for chunk, (r, first, last) in enumerate(spans)
                for tokens, target in sorted(exports[r].items() if exports else ())
                if first < tokens <= last
            ]
            batch = make_batch([([0] * (last - first), first, [0], r) for r, first, last in spans], asked)
            rows = torch.cat([self.inputs[r][first:last] for r, first, last in spans])
            mixed = cpu().delta_mixer(rows, self.params, cache, batch)
            sizes = [last - first for _, first, last in spans]
            for (r, _, _), part in zip(spans, mixed.split(sizes), strict=True):
                out[r].append(part)
        return [torch.cat(parts) for parts in out]

    def truth(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states after every token, in float64."""
        p = self.params
        qkv, z, b, a = self.inputs[request].split(p.splits, dim=-1)
        mixed = naive.causal_conv(qkv, p.conv_weight)
        shape = (p.groups, p.value_heads, p.key_dim, p.value_dim)
        out, states = naive.gated_delta(mixed, b, a, p.decay_rate, p.dt_bias, shape)
        return (naive.rms_norm(out, p.norm, p.eps) * naive.silu(z).view(out.shape)).flatten(1), states


def same_state(cache: RecurrentCache, unit: int, other: RecurrentCache, other_unit: int) -> None:
    same(cache.temporal[unit], other.temporal[other_unit])
    same(cache.conv[unit], other.conv[other_unit])


def test_recurrence_is_right() -> None:
    layer = Recurrence.draw((60, 2))
    cache = layer.cache()
    for request, ours in enumerate(layer.run([[60], [2]], cache)):
        truth, states = layer.truth(request)
        near(ours, truth, 1e-5)
        near(cache.temporal[request].flatten(0, 1), states[-1], 1e-5)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_recurrence_cut_at_every_position(dtype: torch.dtype) -> None:
    layer = Recurrence.draw((150,), groups=2)
    cache = layer.cache(dtype)
    whole = layer.run([[150]], cache)[0]
    for cut in range(1, 150):
        other = layer.cache(dtype, 2)
        same(layer.run([[cut, 150]], other)[0], whole)
        same_state(other, 0, cache, 0)
    other = layer.cache(dtype, 2)
    same(layer.run([list(range(1, 151))], other)[0], whole)
    same_state(other, 0, cache, 0)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_recurrence_in_any_company(dtype: torch.dtype) -> None:
    """Ragged chunks, one longer than the panels that the kernel works on; two threads."""
    lengths = (1, 700, 2, 90, 257, 3)
    layer = Recurrence.draw(lengths)
    alone = [replace(layer, inputs=[rows]) for rows in layer.inputs]
    caches = [one.cache(dtype, 2) for one in alone]
    expected = [one.run([[len(one.inputs[0])]], cache)[0] for one, cache in zip(alone, caches, strict=True)]
    for seed in range(4):
        draw = random.Random(seed)
        cuts = [cuts_of(length, draw, draw.randint(1, 9)) for length in lengths]
        with on(threads=1 + seed % 2):
            cache = layer.cache(dtype)
            for request, ours in enumerate(layer.run(cuts, cache)):
                same(ours, expected[request])
                same_state(cache, request, caches[request], 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_recurrence_on_every_instruction_set(isa: str, dtype: torch.dtype) -> None:
    layer = Recurrence.draw((70, 3), dk=33, dv=50)
    with on("baseline"):
        cache = layer.cache(dtype)
        expected = layer.run([[70], [3]], cache)
    with on(isa):
        other = layer.cache(dtype)
        for request, ours in enumerate(layer.run([[9, 69, 70], [1, 3]], other)):
            same(ours, expected[request])
            same_state(other, request, cache, request)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_exports_are_the_states_of_shorter_requests(dtype: torch.dtype, threads: int) -> None:
    """At the first and last position of a chunk and on both sides of a panel's edge; also none at all."""
    lengths = (300, 5, 40)
    layer = Recurrence.draw(lengths, groups=2)
    wanted = [{1: 10, 2: 11, 3: 12, 4: 13, 100: 14, 255: 15, 256: 16, 257: 17, 300: 18}, {}, {1: 19, 40: 20}]
    plain = layer.cache(dtype)
    expected = layer.run([[length] for length in lengths], plain)
    for cuts in ([[300], [5], [40]], [[2, 256, 300], [1, 5], [39, 40]]):
        cache = layer.cache(dtype)
        with on(threads=threads):
            for ours, theirs in zip(layer.run(cuts, cache, wanted), expected, strict=True):
                same(ours, theirs)
        for request, targets in enumerate(wanted):
            same_state(cache, request, plain, request)
            for tokens, target in targets.items():
                short = replace(layer, inputs=[layer.inputs[request][:tokens]])
                alone = layer.cache(dtype, 2)
                short.run([[tokens]], alone)
                same_state(cache, target, alone, 0)
        untouched = [unit for unit in range(len(cache.conv)) if unit > 20 or 3 <= unit < 10]
        assert cache.conv[untouched].isnan().all()
        assert cache.temporal[untouched].isnan().all()


def test_every_position_exported() -> None:
    layer = Recurrence.draw((40,), groups=1)
    cache, (_, states) = layer.cache(), layer.truth(0)
    layer.run([[7, 40]], cache, [{tokens: tokens + 1 for tokens in range(1, 41)}])
    for tokens in range(1, 41):
        near(cache.temporal[tokens + 1].flatten(0, 1), states[tokens - 1], 1e-5)


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3), value_heads=st.integers(1, 3), dk=st.integers(1, 70), dv=st.integers(1, 70),
    width=st.integers(2, 6), seed=st.integers(0, 999), dtype=st.sampled_from(STATE_DTYPES),
)  # fmt: skip
def test_recurrence_of_any_shape(
    groups: int, value_heads: int, dk: int, dv: int, width: int, seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    layer = Recurrence.draw((20, 4), groups, value_heads, dk, dv, width)
    cache, other = layer.cache(dtype, 8), layer.cache(dtype, 8)
    whole = layer.run([[20], [4]], cache)
    position = draw.randint(1, 20)
    cuts = [cuts_of(20, draw, 4), cuts_of(4, draw, 2)]
    for request, ours in enumerate(layer.run(cuts, other, [{position: 6}, {}])):
        same(ours, whole[request])
        same_state(other, request, cache, request)
    short = replace(layer, inputs=[layer.inputs[0][:position]])
    short.run([[position]], cache)
    same_state(other, 6, cache, 0)
    if dtype == torch.float32:
        _, states = layer.truth(1)
        near(cache.temporal[1].flatten(0, 1), states[-1], 1e-4)


def test_fused_recurrence_is_its_parts() -> None:
    layer = Recurrence.draw((40,))
    fused_cache, cache = layer.cache(), layer.cache()
    fused = layer.run([[30, 40]], fused_cache)[0]
    rows, parts = layer.inputs[0], []
    for first, last in ((0, 30), (30, 40)):
        batch = make_batch([([0] * (last - first), first, [0], 0)])
        parts.append(Backend.delta_mixer(cpu(), rows[first:last], layer.params, cache, batch))
    same(fused, torch.cat(parts))
    same_state(fused_cache, 0, cache, 0)


# Rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 16, 40, 100, 1024])
def test_rows_are_right_and_independent(isa: str, size: int) -> None:
    backend = cpu()
    x, residual, gate = torch.randn(3, 37, size).unbind()
    weight = torch.randn(size)
    wide = torch.cat((x, gate), dim=-1)
    operations = (
        (lambda s: backend.rms_norm(x[s], weight, 1e-5), naive.rms_norm(x, weight, 1e-5)),
        (
            lambda s: backend.add_rms_norm(x[s], residual[s], weight, 1e-5)[0],
            naive.rms_norm(x + residual, weight, 1e-5),
        ),
        (lambda s: backend.add_rms_norm(x[s], residual[s], weight, 1e-5)[1], (x + residual).double()),
        (
            lambda s: backend.gated_rms_norm(x[s], gate[s], weight, 1e-5),
            naive.rms_norm(x, weight, 1e-5) * naive.silu(gate),
        ),
        (lambda s: backend.silu_and_mul(wide[s]), naive.silu(x) * gate.double()),
    )
    for operation, truth in operations:
        with on("baseline"):
            whole = operation(slice(None))
        near(whole, truth, 2e-6)
        with on(isa, threads=2):
            same(operation(slice(None)), whole)
            same(torch.cat([operation(slice(r, r + 1)) for r in range(37)]), whole)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_a_row_do_not_depend_on_others(shared: bool) -> None:
    backend, hidden, inner = cpu(), 48, 20
    gate_up, down = torch.randn(7, 2 * inner, hidden), torch.randn(7, hidden, inner)
    router, x = torch.randn(7, hidden), torch.randn(50, hidden)
    experts = backend.pack_experts(list(gate_up), list(down))
    params = MoeParams(backend.pack_linear(router), experts, 3, True)
    if shared:
        params = replace(
            params,
            shared_gate_up=backend.pack_linear(torch.randn(24, hidden)),
            shared_down=backend.pack_linear(torch.randn(hidden, 12)),
            shared_gate=backend.pack_linear(torch.randn(1, hidden)),
        )
    whole = backend.moe(x, params)
    order = torch.randperm(50)
    same(backend.moe(x[order], params), whole[order])
    same(torch.cat([backend.moe(row[None], params) for row in x]), whole)
    for isa in ISAS:
        with on(isa, threads=2):
            same(backend.moe(x, params), whole)
    if not shared:
        near(whole, naive.moe(x, router, gate_up, down, 3, True), 1e-5)


def test_ties_between_experts_go_to_the_lower_id() -> None:
    """Expert 4 is best and all others tie behind it: 4, 0 and 1 are visited, the broken ones are not."""
    backend, hidden = cpu(), 48
    gate_up, down = torch.randn(7, 40, hidden), torch.randn(7, hidden, 20)
    router, x = torch.zeros(7, hidden), torch.rand(50, hidden)
    router[4] = 0.1
    for broken in (2, 3, 5, 6):
        down[broken] = torch.nan
    params = MoeParams(backend.pack_linear(router), backend.pack_experts(list(gate_up), list(down)), 3, True)
    assert torch.isfinite(backend.moe(x, params)).all()


# What is refused


def test_wrong_inputs_are_refused() -> None:
    backend, heads, layer = cpu(), Heads.draw((4,)), Recurrence.draw((4,))
    angles, batch = heads.angles[:4], make_batch([([0] * 4, 0, [0], 0)])
    cache, states = heads.cache(torch.float32, 16, 2), layer.cache()
    with pytest.raises(ValueError, match="take float32 rows"):
        backend.rms_norm(torch.zeros(2, 4, dtype=torch.bfloat16), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="vector of 4 numbers"):
        backend.rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match="the batch has 4 tokens, its activations 3"):
        backend.attention_mixer(heads.inputs[0][:3], heads.params, angles[:3], angles[:3], cache, batch)
    with pytest.raises(ValueError, match="do not fit a cache"):
        backend.paged_attention(*torch.zeros(3, 4, 2, 16).unbind(), cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="cos and sin"):
        backend.attention_mixer(heads.inputs[0], heads.params, angles[:3], angles[:3], cache, batch)
    with pytest.raises(ValueError, match="the convolution's weight"):
        backend.causal_conv(layer.inputs[0][:, :9], torch.zeros(9, 3), states, batch)
