"""The CPU backend on unusual shapes: rows that lie apart, no rows at all, chunks without tokens, every count.

Around rows that lie apart there is NaN, so that a number read beside them shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import make_batch

from plait.kernels.cpu.native import MISSING, native

if native is None:
    pytest.skip(f"no CPU kernels: {MISSING}", allow_module_level=True)

from test_cpu_gemm import FORMATS, pack
from test_cpu_mixers import KV_DTYPES, STATE_DTYPES, Heads, Recurrence, cpu, on, same, same_state

from plait.kernels.backend import MoeParams


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@st.composite
def gaps(draw: st.DrawFn) -> Callable[[torch.Tensor], torch.Tensor]:
    """Something that moves rows apart: a view of the same numbers among NaN."""
    before, after, step = draw(st.integers(0, 20)), draw(st.integers(0, 20)), draw(st.integers(1, 3))

    def apart(x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        wide = torch.full((rows * step, before + width + after), torch.nan)
        view = wide[::step, before : before + width]
        view.copy_(x)
        return view

    return apart


# Strides


@settings(max_examples=60, deadline=None, derandomize=True)
@given(apart=gaps(), rows=st.integers(0, 9), size=st.integers(1, 70), threads=st.integers(1, 2))
def test_rows_that_lie_apart(apart, rows: int, size: int, threads: int) -> None:
    backend, weight = cpu(), torch.randn(size)
    x, other, wide = torch.randn(rows, size), torch.randn(rows, size), torch.randn(rows, 2 * size)
    with on(threads=threads):
        for operation, inputs in (
            (lambda a: backend.rms_norm(a, weight, 1e-5), (x,)),
            (lambda a, b: torch.cat(backend.add_rms_norm(a, b, weight, 1e-5)), (x, other)),
            (lambda a, b: backend.gated_rms_norm(a, b, weight, 1e-5), (x, other)),
            (backend.silu_and_mul, (wide,)),
        ):
            same(operation(*map(apart, inputs)), operation(*inputs))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(apart=gaps(), rows=st.integers(0, 30), format=st.sampled_from(FORMATS))
def test_linear_layers_of_rows_that_lie_apart(apart, rows: int, format: str) -> None:
    backend, packed = pack(format, torch.randn(20, 64))
    x = torch.randn(rows, 64)
    same(backend.linear(apart(x), packed), backend.linear(x, packed))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(apart=gaps(), dtype=st.sampled_from(KV_DTYPES), threads=st.integers(1, 2))
def test_attention_of_rows_that_lie_apart(apart, dtype: torch.dtype, threads: int) -> None:
    heads = Heads.draw((21,))
    rows, (cos, sin) = heads.inputs[0], (heads.angles.cos(), heads.angles.sin())
    batch = make_batch([([0] * 21, 0, [1, 0], 0)])
    found = []
    with on(threads=threads):
        for x in (rows, apart(rows)):
            cache = heads.cache(dtype, 16, 2)
            found.append(cpu().attention_mixer(x, heads.params, cos, sin, cache, batch))
    same(found[1], found[0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(apart=gaps(), dtype=st.sampled_from(STATE_DTYPES), threads=st.integers(1, 2))
def test_recurrence_of_rows_that_lie_apart(apart, dtype: torch.dtype, threads: int) -> None:
    layer = Recurrence.draw((21,))
    p, rows = layer.params, layer.inputs[0]
    qkv, _, b, a = rows.split(p.splits, dim=-1)
    batch = make_batch([([0] * 21, 0, [0], 0)])
    caches = [layer.cache(dtype, 1) for _ in range(6)]
    with on(threads=threads):
        fused = [
            cpu().delta_mixer(x, p, cache, batch)
            for x, cache in zip((rows, apart(rows)), caches, strict=False)
        ]
        convolved = [
            cpu().causal_conv(x, p.conv_weight, cache, batch)
            for x, cache in zip((qkv.contiguous(), apart(qkv)), caches[2:], strict=False)
        ]
        alone = [
            cpu().gated_delta(move(qkv), move(b), move(a), p.decay_rate, p.dt_bias, cache, batch)
            for move, cache in zip((torch.Tensor.contiguous, apart), caches[4:], strict=True)
        ]
    same_state(caches[1], 0, caches[0], 0)
    same(caches[3].conv[0], caches[2].conv[0])
    same(caches[5].temporal[0], caches[4].temporal[0])
    for theirs, ours in (fused, convolved, alone):
        same(ours, theirs)


# Nothing to do


@st.composite
def chunks(draw: st.DrawFn) -> list[list[int]]:
    """Where the chunks of up to four requests end; chunks may have no tokens, and so may whole requests."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(0, 40))
        found.append([*sorted(draw(st.lists(st.integers(0, length), max_size=5))), length])
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    cuts=chunks(), dtype=st.sampled_from(KV_DTYPES), page_size=st.sampled_from([16, 32, 48, 64]),
    threads=st.integers(1, 2),
)  # fmt: skip
def test_attention_of_chunks_without_tokens(
    cuts: list[list[int]], dtype: torch.dtype, page_size: int, threads: int
) -> None:
    heads = Heads.draw([ends[-1] for ends in cuts])
    whole = heads.run([[ends[-1]] for ends in cuts], dtype)
    with on(threads=threads):
        for ours, theirs in zip(heads.run(cuts, dtype, page_size), whole, strict=True):
            same(ours, theirs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cuts=chunks(), dtype=st.sampled_from(STATE_DTYPES), threads=st.integers(1, 2))
def test_recurrence_of_chunks_without_tokens(cuts: list[list[int]], dtype: torch.dtype, threads: int) -> None:
    layer = Recurrence.draw([ends[-1] for ends in cuts], groups=2)
    cache, other = layer.cache(dtype, 8), layer.cache(dtype, 8)
    whole = layer.run([[ends[-1]] for ends in cuts], cache)
    with on(threads=threads):
        for request, ours in enumerate(layer.run(cuts, other)):
            same(ours, whole[request])
            if cuts[request][-1]:
                same_state(other, request, cache, request)
            else:  # never written: a request at its start has a zero state whatever is there
                assert other.temporal[request].isnan().all()
                assert other.conv[request].isnan().all()


def test_steps_without_tokens() -> None:
    """Nothing comes out, and nothing is written."""
    backend, heads, layer = cpu(), Heads.draw((1,)), Recurrence.draw((1,))
    x = torch.empty(0, 48)
    experts = backend.pack_experts(list(torch.randn(7, 40, 48)), list(torch.randn(7, 48, 20)))
    assert backend.moe(x, MoeParams(backend.pack_linear(torch.randn(7, 48)), experts, 3, True)).shape == (
        0,
        48,
    )
    assert backend.rotary(x.view(0, 2, 24), x[:, :5], x[:, :5]).shape == (0, 2, 24)
    batch, states, nothing = make_batch([([], 3, [0], 0)]), layer.cache(states=1), heads.inputs[0][:0]
    angles = heads.angles[:0]
    pages = heads.cache(torch.float32, 16, 1)
    mixed = backend.attention_mixer(nothing, heads.params, angles, angles, pages, batch)
    assert mixed.shape == (0, 6 * 24)
    assert pages.k.isnan().all()
    assert pages.v.isnan().all()
    states.temporal.fill_(1)
    states.conv.fill_(1)
    assert backend.delta_mixer(layer.inputs[0][:0], layer.params, states, batch).shape == (0, 6 * 40)
    assert (states.temporal == 1).all()
    assert (states.conv == 1).all()


# Every count


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
def test_linear_layers_of_every_number_of_rows(format: str, threads: int) -> None:
    """From 1 to 600, as heads and tails of the same rows, to a number of outputs that fills no panel."""
    backend, packed = pack(format, torch.randn(40, 96), torch.randn(40))
    x = torch.randn(600, 96)
    expected = torch.cat([backend.linear(row, packed) for row in x.split(1)])
    with on(threads=threads):
        for rows in range(1, 601):
            some = slice(rows) if rows % 2 else slice(600 - rows, 600)
            assert torch.equal(backend.linear(x[some], packed), expected[some]), rows


@pytest.mark.parametrize("page_size", [32, 48, 64])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_cut_at_every_phase_of_a_page(dtype: torch.dtype, page_size: int) -> None:
    """Chunks of one page's length, beginning at each of its positions in turn."""
    heads = Heads.draw((3 * page_size,), heads=4)
    length = 3 * page_size
    whole = heads.run([[length]], dtype)[0]
    for phase in range(1, page_size + 1):
        ends = [*range(phase, length, page_size), length]
        same(heads.run([ends], dtype, page_size)[0], whole)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_cut_beside_every_edge_of_its_sums(dtype: torch.dtype) -> None:
    """Tiles of 64 keys and partial sums of 512: a cut before, at and behind each edge."""
    heads = Heads.draw((580,), heads=2, kv_heads=1)
    whole = heads.run([[580]], dtype)[0]
    for edge in (64, 128, 448, 512, 576):
        for threads in (1, 2):
            with on(threads=threads):
                for cut in (edge - 1, edge, edge + 1):
                    same(heads.run([[cut, 580]], dtype, 64)[0], whole)
