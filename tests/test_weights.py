"""Loading weights: both naming forms, shards, experts in either form, and damage named in the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, copy_checkpoint
from safetensors.torch import load_file, save_file
from steps import Harness

from plait.kernels.registry import get_backend
from plait.models.causal_lm import CausalLM
from plait.models.config import UnsupportedModelError
from plait.models.progress import progress_bar
from plait.models.registry import config_from_folder, load_model
from plait.models.sources import DummySource, SafetensorsSource, WeightError

TOKENS = list(range(10, 60))
SINGLE = "model.safetensors"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, source: Any = None, **options: Any) -> CausalLM:
    config = config_from_folder(folder)
    layout = options.pop("layout", None) or config.cache_layout(16, dtype=torch.float32)
    source = source or SafetensorsSource(folder)
    backend = get_backend("reference")
    return load_model(
        config, source, dtype=torch.float32, device="cpu", backend=backend, layout=layout, **options
    )


def logits(model: CausalLM) -> torch.Tensor:
    bench = Harness(model, model.layout, arena_bytes=8 << 20)
    stream = bench.stream(TOKENS)
    bench.step([(stream, len(TOKENS))])
    return stream.logits[0]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Replace the tensors of a folder's file."""
    changed = change(load_file(folder / SINGLE))
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / SINGLE)
    return folder


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused experts taken apart."""
    out = {}
    for name, tensor in tensors.items():
        head, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[f"{head}.experts.{expert}.gate_proj.weight"] = gate
                out[f"{head}.experts.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            out |= {f"{head}.experts.{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def nested(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of a multimodal checkpoint, with parts that a text model skips."""
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    extra = torch.zeros(2)
    return {**renamed, "mtp.norm.weight": extra, "model.visual.blocks.0.norm1.weight": extra.clone()}


def test_experts_one_by_one_and_nested_names(tmp_path: Path) -> None:
    truth = logits(load(checkpoint("qwen3_5_moe")))
    folder = rewrite(
        copy_checkpoint("qwen3_5_moe", tmp_path / "model"), lambda tensors: nested(one_by_one(tensors))
    )
    model = load(folder)
    assert torch.equal(logits(model), truth)
    assert sorted(model.skipped) == ["model.visual.blocks.0.norm1.weight", "mtp.norm.weight"]


def test_a_checkpoint_that_transformers_saves_with_vision(tmp_path: Path) -> None:
    """The conditional-generation form, written by transformers itself, gives the text-only logits."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = json.loads((checkpoint("qwen3_5") / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 96,
              "num_position_embeddings": 16}  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    whole = Qwen3_5ForConditionalGeneration(config)
    tensors = load_file(checkpoint("qwen3_5") / SINGLE)
    inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    whole.model.language_model.load_state_dict(inner)
    whole.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert any(name.startswith("model.visual.") for name in model.skipped)
    assert torch.equal(logits(model), logits(load(checkpoint("qwen3_5"))))


def shard(folder: Path, count: int = 3) -> dict[str, str]:
    """Split a folder's file; returns the weight map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[number % count][name] = tensor
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    mapping = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    return mapping


def test_shards(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "model")
    shard(folder)
    assert torch.equal(logits(load(folder)), logits(load(checkpoint("llama"))))


def test_missing_shard(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "model")
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match=r"shard model-00002-of-00003\.safetensors .* is missing"):
        load(folder)


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "model")
    mapping = shard(folder)
    mapping["model.norm.weight"] = "model-00001-of-00003.safetensors"
    mapping["lm_head.weight"] = "model-00002-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(WeightError, match=r"promises tensor \S+ in model-0000\d-of-00003"):
        load(folder)


def test_missing_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    folder = rewrite(
        copy_checkpoint("llama", tmp_path / "model"),
        lambda tensors: {key: value for key, value in tensors.items() if key != name},
    )
    with pytest.raises(WeightError, match=rf"has no tensor {name} \(shape \[48, 96\]\)"):
        load(folder)


def test_unexpected_tensor(tmp_path: Path) -> None:
    folder = rewrite(
        copy_checkpoint("llama", tmp_path / "model"),
        lambda tensors: {**tensors, "model.layers.9.foo.weight": torch.zeros(3)},
    )
    with pytest.raises(WeightError, match=r"holds 1 tensors that this model does not know: model\.layers\.9"):
        load(folder)


def test_wrong_shape(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    folder = rewrite(
        copy_checkpoint("llama", tmp_path / "model"), lambda tensors: {**tensors, name: tensors[name].T}
    )
    with pytest.raises(WeightError, match=rf"{name} has shape \[208, 96\]; config.json asks for \[96, 208\]"):
        load(folder)


def test_same_tensor_under_both_names(tmp_path: Path) -> None:
    folder = rewrite(
        copy_checkpoint("qwen3_5", tmp_path / "model"),
        lambda tensors: {**tensors, "model.language_model.norm.weight": tensors["model.norm.weight"].clone()},
    )
    with pytest.raises(WeightError, match=r"are both model\.norm\.weight"):
        load(folder)


def test_quantised_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    folder = rewrite(
        copy_checkpoint("llama", tmp_path / "model"),
        lambda tensors: {**tensors, name: tensors[name].to(torch.float8_e4m3fn)},
    )
    with pytest.raises(WeightError, match=rf"{name} is torch.float8_e4m3fn: quantised weights are not built"):
        load(folder)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    folder = copy_checkpoint("llama", tmp_path / "model")
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(WeightError, match=r"model\.safetensors is cut off: tensor \S+ ends at byte [\d,]+"):
        load(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is cut off inside its header"),
        (b"\xff" * 100, "is cut off inside its header"),
        ((4).to_bytes(8, "little") + b"oops" + b"x" * 40, "its header is broken"),
    ],
)
def test_broken_header(tmp_path: Path, data: bytes, message: str) -> None:
    folder = copy_checkpoint("llama", tmp_path / "model")
    (folder / SINGLE).write_bytes(data)
    with pytest.raises(WeightError, match=message):
        load(folder)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"holds neither model\.safetensors nor"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightError, match=r"it holds pytorch_model\.bin, which must be converted"):
        SafetensorsSource(tmp_path)


def test_tied_head_stored_again_is_no_error(tmp_path: Path) -> None:
    folder = rewrite(
        copy_checkpoint("qwen3", tmp_path / "model"),
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    )
    assert torch.equal(logits(load(folder)), logits(load(checkpoint("qwen3"))))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_moe"])
def test_weight_bytes(family: str) -> None:
    """All tensors at the model's width; a tied table counts once."""
    tensors = load_file(checkpoint(family) / SINGLE).values()
    assert load(checkpoint(family)).weight_bytes == sum(tensor.numel() * 4 for tensor in tensors)


def test_progress_reaches_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    load(checkpoint("qwen3_5_moe"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    with progress_bar() as progress:
        load(checkpoint("llama"), progress=progress)
    assert "Loading weights" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_dummy_weights_answer_and_repeat(family: str) -> None:
    folder = checkpoint(family)
    config = config_from_folder(folder)
    first, second, other = (logits(load(folder, DummySource(config, seed))) for seed in (1, 1, 2))
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert 0.1 < first.std() < 10


def test_backend_refuses_a_quantised_cache() -> None:
    config = config_from_folder(checkpoint("llama"))
    layout = config.cache_layout(16, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match="KV cache dtype float8_e4m3fn is not built yet"):
        load(checkpoint("llama"), layout=layout)
