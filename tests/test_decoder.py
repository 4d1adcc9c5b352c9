"""All layers in one native call give the bits of the single operations, in any model and format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, checkpoint
from steps import Harness

from plait.bench.step_share import TimedBackend
from plait.kernels.backend import Backend
from plait.kernels.cpu.native import MISSING, native
from plait.kernels.decoder import LayerParams, NormParams
from plait.kernels.layout import CacheLayout
from plait.models.causal_lm import CausalLM
from plait.models.registry import config_from_folder, load_model
from plait.models.sources import SafetensorsSource

if native is None:
    pytest.skip(f"no CPU kernels: {MISSING}", allow_module_level=True)

from plait.kernels.cpu.backend import CpuBackend
from plait.kernels.cpu.decoder import CpuDecoder

FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_5_moe")


class Stepwise(CpuBackend):
    """The same kernels, called one by one."""

    def decoder(self, layers: Sequence[LayerParams], norm: NormParams) -> None:
        return None


class Rounded(SafetensorsSource):
    """A checkpoint whose matrices are in another dtype; of every third layer they stay in float32."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._dtype = dtype

    def get(self, name: str) -> torch.Tensor:
        weight = super().get(name)
        return weight if weight.dim() < 2 or "layers.2." in name else weight.to(self._dtype)


def layout_of(family: str, kv: torch.dtype | None = None, state: torch.dtype | None = None) -> CacheLayout:
    config = config_from_folder(checkpoint(family))
    return config.cache_layout(16, dtype=torch.float32, kv_dtype=kv, state_dtype=state)


def model(family: str, backend: Backend, layout: CacheLayout, dtype: torch.dtype) -> CausalLM:
    folder = checkpoint(family)
    return load_model(
        config_from_folder(folder), Rounded(folder, dtype), dtype=torch.float32, device="cpu",
        backend=backend, layout=layout,
    )  # fmt: skip


def logits(model: CausalLM, layout: CacheLayout) -> list[torch.Tensor]:
    """Of three requests in mixed steps, one of which goes on from an exported state."""
    draw = random.Random(5)
    harness = Harness(model, layout, arena_bytes=8 << 20)
    streams = [harness.stream([draw.randrange(3, VOCAB) for _ in range(n)]) for n in (70, 3, 35)]
    if layout.state is not None:
        state = harness.new_state()
        harness.step([(streams[1], 2), (streams[0], 40)], exports=[(1, 17, state)])
        streams.append(harness.resume(streams[0], state, 17))
    harness.run(streams, 50)
    return [torch.cat(stream.logits) for stream in streams]


def assert_same(
    family: str, format: str | torch.dtype, layout: CacheLayout | None = None, threads: int = 1
) -> None:
    layout = layout or layout_of(family)
    quantisation, dtype = (format, torch.float32) if isinstance(format, str) else (None, format)
    want = logits(model(family, Stepwise(quantisation), layout, dtype), layout)
    native.set_threads(threads)
    try:
        got = logits(model(family, CpuBackend(quantisation), layout, dtype), layout)
    finally:
        native.set_threads(1)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16, torch.float16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_in_any_weight_format(family: str, format: str | torch.dtype) -> None:
    assert_same(family, format)


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_same_bits_in_any_format_of_pages(kv: torch.dtype) -> None:
    for family in ("llama", "qwen3_5"):
        assert_same(family, torch.float32, layout_of(family, kv=kv))


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
def test_same_bits_in_any_format_of_states(state: torch.dtype) -> None:
    assert_same("qwen3_5", torch.float32, layout_of("qwen3_5", state=state))


def test_same_bits_on_two_threads() -> None:
    for family in ("llama", "qwen3_5_moe"):
        assert_same(family, "int8", threads=2)


def test_layers_have_parts_of_several_formats() -> None:
    """Else the tests above would leave out that a projection is more than one matrix."""
    layout = layout_of("qwen3_5")
    layer = model("qwen3_5", CpuBackend("int4"), layout, torch.float32)._layers[0]
    assert [part.format for part in layer.mixer.in_proj.parts] == ["q4_1", "f32"]


def test_a_cache_of_its_own_for_each_call() -> None:
    """Two caches in turn: neither may see the other's pages."""
    layout = layout_of("llama")
    shared = model("llama", CpuBackend(), layout, torch.float32)
    prompt = [random.Random(6).randrange(3, VOCAB) for _ in range(20)]
    alone = Harness(shared, layout, arena_bytes=4 << 20)
    want = alone.stream(prompt)
    alone.run([want], 5)

    harnesses = [Harness(shared, layout, arena_bytes=4 << 20, seed=seed) for seed in (1, 2)]
    streams = [harnesses[0].stream(prompt), harnesses[1].stream(prompt[::-1])]
    for _ in prompt:
        for harness, stream in zip(harnesses, streams, strict=True):
            harness.step([(stream, 1)])
    assert torch.equal(torch.cat(streams[0].logits), torch.cat(want.logits))


class Kept(CpuBackend):
    """Keeps what a decoder is made of."""

    def decoder(self, layers: Sequence[LayerParams], norm: NormParams) -> CpuDecoder:
        self.layers = list(layers)
        return super().decoder(layers, norm)


def layers_of(family: str) -> list[LayerParams]:
    backend = Kept()
    model(family, backend, layout_of(family), torch.float32)
    return backend.layers


def test_experts_are_called_between_native_calls() -> None:
    dense, sparse = layers_of("qwen3_5"), layers_of("qwen3_5_moe")
    assert all(layer.mlp is not None for layer in dense)
    assert all(layer.mlp is None for layer in sparse)


def test_shapes_are_checked_once() -> None:
    first, *rest = layers_of("llama")
    CpuDecoder([*rest, first], first.post_norm)
    for wrong in (
        replace(first, out_proj=first.in_proj),
        replace(first, in_proj=first.out_proj),
        replace(first, input_norm=replace(first.input_norm, weight=torch.ones(7))),
        replace(first, mlp=(first.in_proj, first.mlp[1])),
    ):
        with pytest.raises(ValueError, match="needed"):
            CpuDecoder([*rest, wrong], first.post_norm)


def test_a_cache_of_another_model_is_refused() -> None:
    layout = layout_of("qwen3")
    with pytest.raises(ValueError, match="do not fit"):
        logits(model("llama", CpuBackend(), layout, torch.float32), layout)


def test_a_decoder_times_its_parts() -> None:
    layout = layout_of("qwen3_5")
    timed = TimedBackend(CpuBackend())
    slow = model("qwen3_5", timed, layout, torch.float32)
    assert timed.take().get("attention", 0.0) == 0.0
    logits(slow, layout)
    spent = timed.take()
    assert set(spent) >= {"gemm", "attention", "recurrence"}
    assert all(seconds > 0 for seconds in spent.values())
    assert all(seconds == 0 for seconds in timed.take().values())
