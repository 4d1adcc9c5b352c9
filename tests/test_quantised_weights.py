"""Models whose weights are quantised: on load, or in the file they come from.

Their logits are held against the reference backend with the same weights, made float again. What then differs
is the rounding of activations alone, so a row or a scale out of place cannot hide in the weights' own error.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoints import VOCAB, checkpoint
from gguf.constants import GGMLQuantizationType as Kind
from steps import Harness

from plait.config import ConfigError, EngineArgs
from plait.engine.explain import estimate_weight_bytes
from plait.engine.resolve import resolve
from plait.kernels.backend import Backend
from plait.kernels.cpu.native import MISSING, native
from plait.kernels.registry import get_backend
from plait.models.causal_lm import CausalLM
from plait.models.gguf import GgufSource
from plait.models.registry import config_from_folder, load_model, parse_config
from plait.models.sources import SafetensorsSource

if native is None:
    pytest.skip(f"no CPU kernels: {MISSING}", allow_module_level=True)

from plait.kernels.cpu.backend import CpuBackend
from plait.kernels.cpu.packing import Linear

ACTIVATIONS = {"int8": 0.04, "int4": 0.15, "q8_0": 0.01, "q4_0": 0.06, "q4_1": 0.06}
"""Relative rms error of logits that rounded activations may bring. The random checkpoints are made so that
errors grow; 12 bits a number, or 8, are rounded in each layer."""


class Rounded(SafetensorsSource):
    """A checkpoint whose weights are what a quantised model makes of them, as float32."""

    def __init__(self, folder: Path, format: str) -> None:
        super().__init__(folder)
        self.format = format

    def get(self, name: str) -> torch.Tensor:
        weight = super().get(name)
        if weight.dim() == 3 and ".experts." in name:
            return torch.stack([self.rounded(one, self.format) for one in weight])
        exact = name.endswith((".gate.weight", "_gate.weight", "in_proj_a.weight", "in_proj_b.weight"))
        if weight.dim() != 2 or exact:
            return weight
        return self.rounded(weight, "int8" if "embed_tokens" in name else self.format)

    @staticmethod
    def rounded(weight: torch.Tensor, format: str) -> torch.Tensor:
        backend = CpuBackend(format)
        return backend.embedding(torch.arange(weight.shape[0]), backend.pack_linear(weight))


def load(config: Any, source: Any, backend: Backend) -> CausalLM:
    layout = config.cache_layout(32, dtype=torch.float32)
    return load_model(config, source, dtype=torch.float32, device="cpu", backend=backend, layout=layout)


def logits(model: CausalLM, vocab: int, length: int = 40) -> torch.Tensor:
    draw = random.Random(3)
    bench = Harness(model, model.layout)
    stream = bench.stream(tuple(draw.randrange(3, vocab) for _ in range(length)))
    bench.step([(stream, length)])
    return torch.cat(stream.logits)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert torch.isfinite(ours).all()
    return float(((ours - truth).square().mean() / truth.square().mean()).sqrt())


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_weights_quantised_on_load(family, format):
    folder = checkpoint(family)
    config = config_from_folder(folder)
    plain = load(config, SafetensorsSource(folder), get_backend("cpu"))
    model = load(config, SafetensorsSource(folder), get_backend("cpu").quantised(format))
    truth = logits(load(config, Rounded(folder, format), get_backend("reference")), VOCAB)
    found = error(logits(model, VOCAB), truth)
    print(f"{family} {format}: {found:.3f}, {model.weight_bytes:,} of {plain.weight_bytes:,} bytes")
    assert found < ACTIVATIONS[format]
    assert model.weight_bytes < plain.weight_bytes / 2.5


def write_gguf(folder: Path, kind: Kind) -> Path:
    """A small Llama model, its weights scaled so that attention does not saturate."""
    metadata = tiny.LLAMA | tiny.tokenizer_metadata(tiny.byte_level(), "gpt2")
    tensors = {
        name: tensor / 8 if tensor.dim() == 2 else tensor for name, tensor in tiny.llama_tensors(500).items()
    }
    return tiny.write_gguf(folder / "model.gguf", metadata, tensors, kind)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_blocks_of_a_file_stay_as_they_are(tmp_path, kind):
    source = GgufSource(write_gguf(tmp_path, kind))
    config, name = parse_config(source.config), kind.name.lower()
    model = load(config, source, get_backend("cpu"))
    found = error(logits(model, 500), logits(load(config, source, get_backend("reference")), 500))
    print(f"{name}: {found:.3f}")
    assert found < ACTIVATIONS[name]
    layer = model._layers[0]
    for packed in (layer.mixer.in_proj, layer.mixer.out_proj, layer.feed_forward.gate_up, model._embedding):
        assert isinstance(packed, Linear)
        assert [part.format for part in packed.parts] == [name]


def test_a_file_is_requantised_when_that_is_asked(tmp_path):
    source = GgufSource(write_gguf(tmp_path, Kind.Q8_0))
    model = load(parse_config(source.config), source, get_backend("cpu").quantised("int4"))
    assert {part.format for part in model._layers[0].mixer.in_proj.parts} == {"q4_1"}


def test_settings():
    folder = str(checkpoint("qwen3_5"))
    plain, eight, four = (
        resolve(EngineArgs(model=folder, quantization=name)) for name in (None, "int8", "int4")
    )
    assert len({resolved.numerics_id for resolved in (plain, eight, four)}) == 3
    sizes = [estimate_weight_bytes(resolved) for resolved in (plain, eight, four)]
    assert sizes[0] > 3 * sizes[1] > 4 * sizes[2]
    with pytest.raises(ConfigError, match=r"quantization='fp3'.*int8, int4"):
        resolve(EngineArgs(model=folder, quantization="fp3"))
    with pytest.raises(ConfigError, match=r"dtype='bfloat16'.*float32"):
        resolve(EngineArgs(model=folder, dtype="bfloat16"))


def test_an_estimate_is_near_what_is_held():
    folder = checkpoint("qwen3_5")
    config = config_from_folder(folder)
    model = load(config, SafetensorsSource(folder), get_backend("cpu"))
    estimate = estimate_weight_bytes(resolve(EngineArgs(model=str(folder))))
    assert estimate == pytest.approx(model.weight_bytes, rel=0.1)
