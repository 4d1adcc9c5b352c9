"""Linear layers of the CPU backend: equal bits however rows, threads and instruction sets are chosen.

An output is one chain over its inputs, so whatever surrounds a row must not change a bit of its result. How
near results are to the truth is measured against float64 products with the weights as they are stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.backend import Rows
from plait.kernels.cpu.native import MISSING, native

if native is None:
    pytest.skip(f"no CPU kernels: {MISSING}", allow_module_level=True)

from plait.kernels.cpu.backend import CpuBackend
from plait.kernels.cpu.packing import Experts, Linear

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
QUANTISED = {"int8": "int8", "int4": "q4_1"}
"""What is asked -> the format that weights get."""
BLOCKS = ("q8_0", "q4_0", "q4_1")
FORMATS = (*FLOATS, *QUANTISED, *BLOCKS)
ISAS = native.isas()

ERRORS = {"f32": 2e-6, "bf16": 2e-6, "f16": 2e-6, "int8": 7e-4, "q8_0": 7e-4, "int4": 7e-3, "q4_0": 7e-3}
"""Relative rms error that quantised activations may bring; q4_1 as q4_0."""


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    isa, threads = native.isa(), native.threads()
    torch.manual_seed(0)
    native.set_threads(1)
    yield
    native.use_isa(isa)
    native.set_threads(threads)


@contextmanager
def on(isa: str, threads: int = 1) -> Iterator[None]:
    before = native.isa()
    native.use_isa(isa)
    native.set_threads(threads)
    try:
        yield
    finally:
        native.use_isa(before)
        native.set_threads(1)


def blocks_of(format: str, weight: torch.Tensor) -> Rows:
    kind = gguf.GGMLQuantizationType[format.upper()]
    return Rows(torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind)), format, weight.shape[1])


def pack(format: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[CpuBackend, Linear]:
    """A layer in one of the formats, and the backend that packed it."""
    backend = CpuBackend(format if format in QUANTISED else None)
    if format in BLOCKS:
        packed = backend.pack_rows([blocks_of(format, weight)], bias)
    else:
        packed = backend.pack_linear(weight.to(FLOATS.get(format, torch.float32)), bias)
    assert isinstance(packed, Linear)
    assert [part.format for part in packed.parts] == [QUANTISED.get(format, format)]
    return backend, packed


def dense(backend: CpuBackend, packed: Linear) -> torch.Tensor:
    """The weights that a packed layer stands for, float32 [N, K]."""
    return backend.embedding(torch.arange(packed.outputs), packed)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float(((ours.double() - truth).square().mean() / truth.square().mean()).sqrt())


def shape_for(format: str) -> tuple[int, int]:
    """Neither whole panels nor, where that can be, whole blocks; more panels than are read side by side."""
    return (165, 352) if format in BLOCKS else (165, 331)


# -- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_rows_bits_depend_on_the_row_alone(format, isa):
    outputs, inputs = shape_for(format)
    backend, packed = pack(format, torch.randn(outputs, inputs), torch.randn(outputs))
    x = torch.randn(600, inputs)
    expected = torch.cat([backend.linear(row, packed) for row in x.split(1)])
    order = torch.randperm(600)
    for threads in (1, 2):
        with on(isa, threads):
            assert torch.equal(backend.linear(x, packed), expected)
            assert torch.equal(backend.linear(x[order], packed), expected[order])
            for rows in (*range(1, 15), 24, 25, 64):
                some = slice(600 - 7 * rows, 600 - 6 * rows)
                assert torch.equal(backend.linear(x[some], packed), expected[some])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_long_rows_are_taken_in_stretches_without_a_trace(format, isa):
    """More inputs than go through many rows at once: sums are put down and taken up again on the way."""
    outputs, inputs = 77, 2 * 1024 + 32
    backend, packed = pack(format, torch.randn(outputs, inputs), torch.randn(outputs))
    x = torch.randn(40, inputs)
    expected = torch.cat([backend.linear(row, packed) for row in x.split(1)])
    for threads in (1, 2):
        with on(isa, threads):
            assert torch.equal(backend.linear(x, packed), expected)
            assert torch.equal(backend.linear(x[13:30], packed), expected[13:30])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    format=st.sampled_from(FORMATS), isa=st.sampled_from(ISAS), threads=st.integers(1, 3),
    rows=st.integers(0, 40), outputs=st.integers(1, 200), inputs=st.integers(1, 300), biased=st.booleans(),
)  # fmt: skip
def test_any_shape_gives_the_same_bits_everywhere(format, isa, threads, rows, outputs, inputs, biased):
    if format in BLOCKS:
        inputs = 32 * (1 + inputs // 32)
    backend, packed = pack(format, torch.randn(outputs, inputs), torch.randn(outputs) if biased else None)
    x = torch.randn(rows, inputs)
    expected = backend.linear(x, packed)
    assert expected.shape == (rows, outputs)
    with on(isa, threads):
        assert torch.equal(backend.linear(x, packed), expected)
        assert torch.equal(dense(backend, packed), dense(backend, packed))
    if rows:
        assert torch.equal(backend.linear(x[-1:], packed), expected[-1:])


@pytest.mark.parametrize("format", FORMATS)
def test_tables_have_the_same_rows_on_every_instruction_set(format):
    outputs, inputs = shape_for(format)
    backend, packed = pack(format, torch.randn(outputs, inputs))
    ids = torch.tensor([164, 0, 15, 16, 164])
    expected = dense(backend, packed)[ids]
    for isa in ISAS:
        with on(isa, 2):
            assert torch.equal(backend.embedding(ids, packed), expected)


@pytest.mark.parametrize("format", ["f32", "int8", "int4"])
def test_the_callers_floating_point_mode_changes_nothing(format):
    backend, packed = pack(format, torch.randn(20, 64) * 1e-20)
    x = torch.randn(3, 64) * 1e-20  # products are denormal
    expected = backend.linear(x, packed)
    if format == "f32":
        assert expected.any()
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(backend.linear(x, packed), expected)
    finally:
        torch.set_flush_denormal(False)


def test_a_forked_child_has_threads_of_its_own():
    backend, packed = pack("f32", torch.randn(640, 512))
    x = torch.randn(64, 512)
    with on(native.isa(), 2):
        expected = backend.linear(x, packed)
        child = os.fork()
        if child == 0:  # torch's own threads do not survive a fork: numpy compares
            os._exit(0 if np.array_equal(backend.linear(x, packed).numpy(), expected.numpy()) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(backend.linear(x, packed), expected)


# -- nearness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [64, 1024, 4096])
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_near_the_truth(format, inputs):
    backend, packed = pack(format, torch.randn(48, inputs))
    x = torch.randn(33, inputs)
    truth = x.double() @ dense(backend, packed).double().T
    assert relative_error(backend.linear(x, packed), truth) < ERRORS.get(format, 7e-3)


def test_sums_of_integers_never_overflow():
    # Every product is the largest there is; int32 alone would be full after 8,260 of them.
    backend, packed = pack("int8", torch.full((16, 20_001), -3.0))
    x = torch.full((2, 20_001), 5.0)
    truth = torch.full((2, 16), -15.0 * 20_001)
    for isa in ISAS:
        with on(isa):
            torch.testing.assert_close(backend.linear(x, packed), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", ["int4", "q4_0", "q4_1"])
def test_sums_of_nibbles_never_overflow(format):
    # -8 is stored as 0 and 7 as 15: the largest weight beside the largest activations of one sign.
    weight = torch.full((16, 128), 7.0)
    weight[:, ::32] = -8.0
    backend, packed = pack(format, weight)
    for sign in (1.0, -1.0):
        x = torch.full((13, 128), sign)
        truth = x.double() @ dense(backend, packed).double().T
        for isa in ISAS:
            with on(isa):
                assert relative_error(backend.linear(x, packed), truth) < 1e-6


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(format, bad):
    outputs, inputs = shape_for(format)
    backend, packed = pack(format, torch.randn(outputs, inputs))
    x = torch.randn(20, inputs)
    expected = backend.linear(x, packed)
    x[7, 5] = bad
    for isa in ISAS:
        with on(isa):
            result = backend.linear(x, packed)
            assert not result[7].isfinite().any()
            others = torch.arange(20) != 7
            assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_give_the_bias(format):
    outputs, inputs = shape_for(format)
    bias = torch.randn(outputs)
    backend, packed = pack(format, torch.randn(outputs, inputs), bias)
    assert torch.equal(backend.linear(torch.zeros(2, inputs), packed), bias.expand(2, -1))


# -- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FLOATS)
def test_weights_keep_their_width(format):
    weight = torch.randn(77, 45).to(FLOATS[format])
    backend, packed = pack(format, weight.float())
    assert torch.equal(dense(backend, packed), weight.float())
    assert packed.nbytes <= 80 * (45 * weight.itemsize + 64)


@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_of_files_lose_nothing(format):
    weight = torch.randn(77, 352)
    backend, packed = pack(format, weight)
    blocks = blocks_of(format, weight).data.numpy()
    truth = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format.upper()])
    assert torch.equal(dense(backend, packed), torch.from_numpy(np.ascontiguousarray(truth)))
    assert packed.nbytes < 1.1 * 80 / 77 * blocks.nbytes


def test_int8_weights_follow_their_formula():
    weight = torch.randn(33, 131)
    weight[5] = 0
    scale = weight.abs().amax(1, keepdim=True) / 127
    truth = torch.round(weight / scale).nan_to_num() * scale
    backend, packed = pack("int8", weight)
    assert torch.equal(dense(backend, packed), truth)


def on_lines(outputs: int, groups: int) -> torch.Tensor:
    """Weights [outputs, groups * 32] that int4 can hold: code * scale + minimum, each code in use."""
    codes = torch.stack([torch.randperm(32) % 16 for _ in range(outputs * groups)]).view(outputs, groups, 32)
    scale = torch.rand(outputs, groups, 1).add(0.01).half().float()
    minimum = torch.randn(outputs, groups, 1).half().float()
    return (codes * scale + minimum).flatten(1)


def test_int4_holds_what_16_codes_can_say():
    weight = on_lines(33, 3)
    weight[5] = 0
    weight[7, 32:64] = -1.75
    backend, packed = pack("int4", weight)
    assert torch.equal(dense(backend, packed), weight)


@pytest.mark.parametrize("inputs", [192, 181])
def test_int4_weights_are_nearer_than_between_least_and_most(inputs):
    weight = torch.randn(33, inputs) + torch.randn(33, 1)
    backend, packed = pack("int4", weight)
    stored = dense(backend, packed)
    errors = []
    for ours, truth in zip(stored.split(32, dim=1), weight.split(32, dim=1), strict=True):
        least, most = truth.aminmax(dim=1, keepdim=True)
        scale, least = ((most - least) / 15).half().float(), least.half().float()
        plain = torch.round((truth - least) / scale).clamp(0, 15) * scale + least
        counts = 1 + truth.abs() / truth.square().mean(1, keepdim=True).sqrt()
        error, plain_error = ((counts * (x - truth).square()).double().sum(1) for x in (ours, plain))
        assert bool((error <= plain_error * (1 + 1e-4)).all())
        assert all(len(row.unique()) <= 16 for row in ours)
        errors.append(float(error.sum() / plain_error.sum()))
    assert max(errors) < 0.95
    assert relative_error(stored, weight.double()) < 0.08


def test_weights_that_are_not_finite_are_not_quantised():
    weight = torch.randn(4, 64)
    weight[2, 3] = float("inf")
    for format in QUANTISED:
        with pytest.raises(ValueError, match="infinite"):
            pack(format, weight)


def test_parts_of_a_layer_may_differ_in_format():
    weights = [torch.randn(rows, 64) for rows in (40, 23, 16, 5)]
    parts = [Rows(weights[0].bfloat16()), Rows(weights[1].bfloat16()), Rows(weights[2])]
    parts.append(blocks_of("q8_0", weights[3]))
    backend, bias, x = CpuBackend(), torch.randn(84), torch.randn(9, 64)
    packed = backend.pack_rows(parts, bias)
    assert isinstance(packed, Linear)
    assert [(part.format, part.outputs) for part in packed.parts] == [("bf16", 63), ("f32", 16), ("q8_0", 5)]
    alone = [backend.linear(x, backend.pack_rows([part])) for part in parts]
    assert torch.equal(backend.linear(x, packed), torch.cat(alone, dim=1) + bias)


def test_exact_parts_are_not_quantised_and_tables_have_8_bits():
    backend = CpuBackend().quantised("int4")
    packed = backend.pack_rows([Rows(torch.randn(32, 64)), Rows(torch.randn(8, 64).bfloat16(), exact=True)])
    assert isinstance(packed, Linear)
    assert [part.format for part in packed.parts] == ["q4_1", "bf16"]
    table = backend.pack_table(Rows(torch.randn(32, 64)))
    assert isinstance(table, Linear)
    assert [part.format for part in table.parts] == ["int8"]
    with pytest.raises(ValueError, match="int8, int4"):
        CpuBackend().quantised("awq")


def test_a_tied_head_costs_nothing():
    backend, table = CpuBackend(), torch.randn(50, 48).bfloat16()
    packed = backend.pack_embedding(table)
    head = backend.tied_head(packed)
    assert head.nbytes == 0
    assert packed.nbytes >= table.nbytes
    x = torch.randn(3, 48)
    assert torch.equal(backend.linear(x, head), backend.linear(x, backend.pack_linear(table)))


# -- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["f32", "bf16", "int8", "int4"])
def test_experts_are_linear_layers(format):
    backend = CpuBackend(format if format in QUANTISED else None)
    dtype = FLOATS.get(format, torch.float32)
    counts = [3, 0, 1, 30, 0, 13]
    weights = [[torch.randn(*shape).to(dtype) for _ in counts] for shape in ((40, 45), (45, 20))]
    experts = backend.pack_experts(*weights)
    assert isinstance(experts, Experts)
    starts = torch.tensor([0, *np.cumsum(counts)])
    sources = torch.randint(0, 11, (sum(counts),))
    x, inner = torch.randn(11, 45), torch.randn(sum(counts), 20)
    expected = [
        torch.cat([
            backend.linear(rows[first:last], backend.pack_linear(weight))
            for weight, first, last in zip(side, starts[:-1], starts[1:], strict=True)
        ])
        for side, rows in zip(weights, (x[sources], inner), strict=True)
    ]  # fmt: skip
    for isa in ISAS:
        for threads in (1, 2):
            with on(isa, threads):
                assert torch.equal(backend.expert_linear(x, experts, "gate_up", starts, sources), expected[0])
                assert torch.equal(backend.expert_linear(inner, experts, "down", starts, None), expected[1])
    nobody = torch.zeros(7, dtype=torch.int64)
    assert backend.expert_linear(x[:0], experts, "gate_up", nobody, None).shape == (0, 40)
