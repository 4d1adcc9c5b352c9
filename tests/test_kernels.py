"""Kernel registry, and each kernel of the reference backend against its naive float64 twin.

The twins see whole requests; the kernels see them cut into chunks, mixed with others, in an arena of NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import naive
import pytest
import torch
from steps import make_batch, nan_arena

from plait.kernels import registry
from plait.kernels.backend import DeltaParams, MoeParams
from plait.kernels.batch import Batch
from plait.kernels.layout import CacheLayout, CacheViews, PageLayout, StateLayout
from plait.kernels.reference import ReferenceBackend
from plait.kernels.registry import get_backend

GROUPS, PER_GROUP, DK, DV, WIDTH = 3, 2, 6, 10, 4
CHANNELS = GROUPS * (2 * DK + PER_GROUP * DV)
HEADS, KV_HEADS, DIM = 6, 2, 24
LENGTHS = (37, 2, 50)
"""Tokens of three requests that share every batch."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def views(dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> CacheViews:
    page = PageLayout(page_size=16, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype)
    state = StateLayout(2, GROUPS, PER_GROUP, DK, DV, WIDTH, dtype, state_dtype or dtype)
    layout = CacheLayout(page, state)
    return CacheViews(nan_arena(2 << 20), layout, layout.geometry(2 << 20, 1))


def steps(cuts: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Batch, list[tuple[int, slice]]]]:
    """Batches in which each request advances to its next cut; requests that are done drop out.

    Yields each batch with (request, its rows of the request) of every chunk.
    """
    pages = [[40, 3, 17, 29], [8], [25, 24, 31, 2]]
    for number in range(max(len(cut) for cut in cuts)):
        chunks, parts = [], []
        for request, cut in enumerate(cuts):
            if number < len(cut):
                first, last = (0, *cut)[number], cut[number]
                chunks.append(([0] * (last - first), first, pages[request], request + 4))
                parts.append((request, slice(first, last)))
        yield make_batch(chunks), parts


CUTS = [
    ((37,), (2,), (50,)),
    ((1, 2, 3, 36, 37), (1, 2), (17, 33, 49, 50)),
    ((16, 32, 33, 37), (2,), (48, 50)),
]
cuttings = pytest.mark.parametrize("cuts", CUTS, ids=["whole", "ragged", "blocks"])


def rows(requests: list[torch.Tensor], parts: list[tuple[int, slice]]) -> torch.Tensor:
    return torch.cat([requests[request][part] for request, part in parts])


def draw(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(length, *shape).to(dtype) for length in LENGTHS]


def collect(out: torch.Tensor, parts: list[tuple[int, slice]], into: list[list[torch.Tensor]]) -> None:
    sizes = [part.stop - part.start for _, part in parts]
    for (request, _), piece in zip(parts, out.split(sizes), strict=True):
        into[request].append(piece)


def assert_near(ours: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert torch.isfinite(ours).all()
    assert (ours.double() - truth).abs().max() / truth.abs().max() < TOLERANCE[dtype]


# Registry


def test_reference_is_registered() -> None:
    backend = get_backend("reference", "cpu")
    assert (backend.name, backend.row_invariant, backend.state_grid) == ("reference", False, 1)
    assert "reference" in registry.backend_names()
    assert get_backend().unavailable("cpu") is None


def test_duplicates_are_refused() -> None:
    get_backend()
    with pytest.raises(ValueError, match="named 'reference' is registered already"):
        registry.register(ReferenceBackend())


def test_unknown_backend_lists_those_known() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel backend 'cuda9'; there are: .*reference"):
        get_backend("cuda9")


def test_backend_says_why_it_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"cannot run on nonsense: 'nonsense' is not a torch device"):
        get_backend("reference", "nonsense")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_caches_are_refused(dtype: torch.dtype) -> None:
    backend = get_backend("reference")
    assert "is not built yet" in (backend.supports(kv_dtype=dtype) or "")
    assert backend.supports(dtype=torch.bfloat16, kv_dtype=torch.float16, state_dtype=torch.float32) is None
    assert "multiple of 16" in (backend.supports(page_size=40) or "")


# Row-wise kernels


@dtypes
def test_linear(dtype: torch.dtype) -> None:
    backend = get_backend("reference")
    x, weight, bias = torch.randn(5, 24).to(dtype), torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
    packed = backend.pack_linear(weight, bias)
    truth = x.double() @ weight.double().T + bias.double()
    assert packed.nbytes == (40 * 24 + 40) * dtype.itemsize
    assert_near(backend.linear(x, packed), truth, dtype)
    if dtype == torch.bfloat16:
        assert_near(backend.linear(x, packed, out_dtype=torch.float32), truth, torch.float32)


def test_tied_head_shares_memory() -> None:
    backend = get_backend("reference")
    table = torch.randn(30, 8)
    embedding = backend.pack_embedding(table)
    head = backend.tied_head(embedding)
    assert head.nbytes == 0
    rows = backend.embedding(torch.tensor([3, 29]), embedding)
    assert torch.equal(rows, table[[3, 29]])
    assert_near(backend.linear(rows, head), rows.double() @ table.double().T, torch.float32)


@dtypes
def test_norms(dtype: torch.dtype) -> None:
    backend = get_backend("reference")
    x, residual = torch.randn(5, 3, 24).to(dtype), torch.randn(5, 3, 24).to(dtype)
    weight, gate = torch.randn(24), torch.randn(5, 3, 24).to(dtype)
    assert_near(backend.rms_norm(x, weight, 1e-3), naive.rms_norm(x, weight, 1e-3), dtype)
    total = x + residual
    normed, kept = backend.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(kept, total)
    assert_near(normed, naive.rms_norm(total, weight, 1e-3), dtype)
    truth = naive.rms_norm(x, weight, 1e-3) * naive.silu(gate)
    assert_near(backend.gated_rms_norm(x, gate, weight, 1e-3), truth, dtype)


@dtypes
def test_rotary_leaves_the_rest_of_a_head(dtype: torch.dtype) -> None:
    backend = get_backend("reference")
    x, angles = torch.randn(7, 3, 24).to(dtype), torch.rand(7, 5) * 6
    cos, sin = angles.cos(), angles.sin()
    turned = backend.rotary(x, cos, sin)
    assert_near(turned, naive.rotary(x, cos, sin), dtype)
    assert torch.equal(turned[..., 10:], x[..., 10:])


@dtypes
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(5, 46).to(dtype)
    truth = naive.silu(x[:, :23]) * x[:, 23:].double()
    assert_near(get_backend("reference").silu_and_mul(x), truth, dtype)


# Attention


@dtypes
@cuttings
def test_paged_attention(cuts: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    backend, cache = get_backend("reference"), views(dtype).attention[1]
    q, gate = draw(HEADS, DIM, dtype=dtype), draw(HEADS, DIM, dtype=dtype)
    k, v = draw(KV_HEADS, DIM, dtype=dtype), draw(KV_HEADS, DIM, dtype=dtype)
    out: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for batch, parts in steps(cuts):
        mixed = backend.paged_attention(
            *(rows(tensor, parts) for tensor in (q, k, v)), cache, batch, scale=0.3, gate=rows(gate, parts)
        )
        collect(mixed, parts, out)
    for request in range(len(LENGTHS)):
        truth = naive.attention(q[request], k[request], v[request], 0.3)
        truth = truth * torch.sigmoid(gate[request].double()).flatten(1)
        assert_near(torch.cat(out[request]), truth, dtype)


def test_attention_tiles_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on scores held at once changes nothing but the memory."""
    from plait.kernels import reference

    backend, cache = get_backend("reference"), views(torch.float64).attention[0]
    q, k, v = (draw(heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    (batch, parts), *_ = steps(CUTS[0])
    whole = backend.paged_attention(*(rows(t, parts) for t in (q, k, v)), cache, batch, scale=0.3)
    monkeypatch.setattr(reference, "SCORE_BUDGET", 2000)
    tiled = backend.paged_attention(*(rows(t, parts) for t in (q, k, v)), cache, batch, scale=0.3)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


# Recurrence


@dtypes
@cuttings
def test_causal_conv(cuts: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    backend, cache = get_backend("reference"), views(dtype).recurrent[1]
    x, weight = draw(CHANNELS, dtype=dtype), torch.randn(CHANNELS, WIDTH).to(dtype)
    out: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for batch, parts in steps(cuts):
        collect(backend.causal_conv(rows(x, parts), weight, cache, batch), parts, out)
    for request in range(len(LENGTHS)):
        assert_near(torch.cat(out[request]), naive.causal_conv(x[request], weight), dtype)
        last = torch.cat((torch.zeros(WIDTH, CHANNELS, dtype=dtype), x[request]))[-(WIDTH - 1) :]
        kept = cache.conv[request + 4].transpose(0, 1).flatten(1)
        assert torch.equal(kept, last), "the state is the inputs before the convolution"


@dtypes
@cuttings
def test_gated_delta(cuts: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    backend = get_backend("reference")
    cache = views(dtype, torch.float32 if dtype == torch.bfloat16 else dtype).recurrent[0]
    qkv, b, a = (draw(size, dtype=dtype) for size in (CHANNELS, 6, 6))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    decay_rate, dt_bias = -torch.rand(6, dtype=wide), torch.randn(6, dtype=wide)
    out: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for batch, parts in steps(cuts):
        inputs = [rows(tensor, parts) for tensor in (qkv, b, a)]
        collect(backend.gated_delta(*inputs, decay_rate, dt_bias, cache, batch), parts, out)
    for request in range(len(LENGTHS)):
        inputs = [tensor[request] for tensor in (qkv, b, a)]
        truth, states = naive.gated_delta(*inputs, decay_rate, dt_bias, (GROUPS, PER_GROUP, DK, DV))
        assert_near(torch.cat(out[request]), truth, dtype)
        kept = cache.temporal[request + 4].flatten(0, 1).double()
        assert (kept - states[-1]).abs().max() < 1e-5


def test_exports_copy_the_state_at_their_position() -> None:
    """Both states after exactly so many tokens: mid-chunk, at the end, from zero and from context."""
    backend, cache = get_backend("reference"), views(torch.float64).recurrent[1]
    qkv, b, a = (draw(size, dtype=torch.float64) for size in (CHANNELS, 6, 6))
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64)
    decay_rate, dt_bias = -torch.rand(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    wanted = [{20: 10, 37: 11}, {1: 12, 2: 13}, {17: 14, 18: 15, 33: 16, 50: 17}]
    for batch, parts in steps(((37,), (2,), (17, 50))):
        exports = [
            (chunk, tokens - part.start, target)
            for chunk, (request, part) in enumerate(parts)
            for tokens, target in wanted[request].items()
            if part.start < tokens <= part.stop
        ]
        batch = dataclasses.replace(batch, exports=tuple(exports))
        mixed = backend.causal_conv(rows(qkv, parts), weight, cache, batch)
        backend.gated_delta(mixed, rows(b, parts), rows(a, parts), decay_rate, dt_bias, cache, batch)
    for request, targets in enumerate(wanted):
        mixed = naive.causal_conv(qkv[request], weight)
        shape = (GROUPS, PER_GROUP, DK, DV)
        _, states = naive.gated_delta(mixed, b[request], a[request], decay_rate, dt_bias, shape)
        padded = torch.cat((torch.zeros(WIDTH - 1, CHANNELS), qkv[request]))
        for tokens, target in targets.items():
            torch.testing.assert_close(cache.temporal[target].flatten(0, 1), states[tokens - 1])
            columns = padded[tokens : tokens + WIDTH - 1]
            assert torch.equal(cache.conv[target].transpose(0, 1).flatten(1), columns)
    untouched = [slot for slot in range(len(cache.conv)) if slot not in {4, 5, 6, *range(10, 18)}]
    assert cache.conv[untouched].isnan().all()
    assert cache.temporal[untouched].isnan().all()


def test_low_precision_state_is_rounded_after_every_token() -> None:
    """So that a state handed over between two chunks loses nothing that an uncut chunk would keep."""
    backend = get_backend("reference")
    qkv, b, a = (draw(size, dtype=torch.float32) for size in (CHANNELS, 6, 6))
    decay_rate, dt_bias = -torch.rand(6), torch.randn(6)
    results = []
    for cuts in CUTS[:2]:
        cache = views(torch.float32, torch.bfloat16).recurrent[0]
        for batch, parts in steps(cuts):
            backend.gated_delta(*(rows(t, parts) for t in (qkv, b, a)), decay_rate, dt_bias, cache, batch)
        results.append(cache.temporal[4:7].float())
    assert (results[0] - results[1]).abs().max() < 0.02
    assert (results[0] == results[1]).float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_mixer_is_its_parts(dtype: torch.dtype) -> None:
    """The composed operation takes qkv, z, b and a from one projected row."""
    backend, cache = get_backend("reference"), views(dtype, torch.float32).recurrent[0]
    params = DeltaParams(
        GROUPS, PER_GROUP, DK, DV, torch.randn(CHANNELS, WIDTH).to(dtype),
        -torch.rand(6), torch.randn(6), torch.randn(DV), 1e-6,
    )  # fmt: skip
    x = torch.randn(9, sum(params.splits)).to(dtype)
    out = backend.delta_mixer(x, params, cache, make_batch([([0] * 9, 0, [1], 2)]))
    qkv, z, b, a = x.split(params.splits, dim=-1)
    mixed = naive.causal_conv(qkv, params.conv_weight)
    shape = (GROUPS, PER_GROUP, DK, DV)
    truth, _ = naive.gated_delta(mixed, b, a, params.decay_rate, params.dt_bias, shape)
    truth = naive.rms_norm(truth, params.norm, 1e-6) * naive.silu(z).view(9, 6, DV)
    assert_near(out, truth.flatten(1), dtype)


# Mixture of experts


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moe(dtype: torch.dtype, renormalise: bool) -> None:
    backend = get_backend("reference")
    x, router = torch.randn(11, 24).to(dtype), torch.randn(7, 24).to(dtype)
    gate_up, down = torch.randn(7, 20, 24).to(dtype), torch.randn(7, 24, 10).to(dtype)
    experts = backend.pack_experts(list(gate_up), list(down))
    params = MoeParams(backend.pack_linear(router), experts, 3, renormalise)
    truth = naive.moe(x, router, gate_up, down, 3, renormalise)
    assert_near(backend.moe(x, params), truth, dtype)

    shared = torch.randn(12, 24).to(dtype), torch.randn(24, 6).to(dtype), torch.randn(1, 24).to(dtype)
    params = dataclasses.replace(
        params,
        shared_gate_up=backend.pack_linear(shared[0]),
        shared_down=backend.pack_linear(shared[1]),
        shared_gate=backend.pack_linear(shared[2]),
    )
    hidden = x.double() @ shared[0].double().T
    extra = (naive.silu(hidden[:, :6]) * hidden[:, 6:]) @ shared[1].double().T
    truth = truth + torch.sigmoid(x.double() @ shared[2].double().T) * extra
    assert_near(backend.moe(x, params), truth, dtype)


def test_moe_ties_go_to_the_lower_id() -> None:
    """Experts 1, 2, 4 and 5 tie behind expert 3: with three to choose, 3, 1 and 2 are taken."""
    backend = get_backend("reference")
    router = torch.zeros(6, 8)
    router[3], router[0] = 0.1, -0.1
    gate_up, down = torch.randn(6, 10, 8), torch.randn(6, 8, 5)
    x = torch.rand(4, 8)
    params = MoeParams(backend.pack_linear(router), backend.pack_experts(list(gate_up), list(down)), 3, True)
    truth = naive.moe(x, router, gate_up, down, 3, True)
    assert_near(backend.moe(x, params), truth, torch.float32)
    down[4:], gate_up[4:] = 0, 0
    params = MoeParams(backend.pack_linear(router), backend.pack_experts(list(gate_up), list(down)), 3, True)
    assert_near(backend.moe(x, params), truth, torch.float32)
