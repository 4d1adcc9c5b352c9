"""The same model with its channels in another order: what it computes stays, what lies in a group does not.

A model that was rounded before, in groups of consecutive inputs, is easily rounded again in the same groups:
each has few different numbers. Shuffled, groups are what they would be in a model that was never rounded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def shuffled(folder: Path, target: Path, seed: int = 7) -> Path:
    """A copy of a Llama checkpoint whose every matrix has its inputs shuffled, and whose logits are the same.

    Args:
        folder: with config.json and one model.safetensors.
        target: made when missing.
    """
    if (target / "config.json").exists():
        return target
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(config["hidden_size"], generator=draw)
    for name, weight in tensors.items():
        if weight.dim() == 1:
            tensors[name] = weight[hidden]
        elif not name.endswith(("o_proj.weight", "down_proj.weight")):  # reads the residual stream
            tensors[name] = weight[:, hidden]
        else:
            tensors[name] = weight[hidden]
    for index in range(config["num_hidden_layers"]):
        _shuffle_inside(tensors, f"model.layers.{index}", config, draw)
    target.mkdir(parents=True, exist_ok=True)
    whole = {name: weight.contiguous() for name, weight in tensors.items()}
    save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
    for file in sorted(folder.glob("*.json"), key=lambda file: file.name == "config.json"):
        shutil.copy(file, target / file.name)
    return target


def _shuffle_inside(
    tensors: dict[str, torch.Tensor], layer: str, config: dict[str, int], draw: torch.Generator
) -> None:
    """Shuffle what lies between the matrices of a layer: channels of the MLP, and of each head's values."""

    def take(name: str, order: torch.Tensor, dim: int) -> None:
        key = f"{layer}.{name}.weight"
        tensors[key] = tensors[key].index_select(dim, order)

    inner = torch.randperm(config["intermediate_size"], generator=draw)
    take("mlp.gate_proj", inner, 0)
    take("mlp.up_proj", inner, 0)
    take("mlp.down_proj", inner, 1)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    orders = [torch.randperm(size, generator=draw) for _ in range(kv_heads)]
    take("self_attn.v_proj", torch.cat([h * size + order for h, order in enumerate(orders)]), 0)
    queries = [h * size + orders[h * kv_heads // heads] for h in range(heads)]
    take("self_attn.o_proj", torch.cat(queries), 1)
