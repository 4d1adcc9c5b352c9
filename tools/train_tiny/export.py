"""The trained weights as an ordinary checkpoint folder of the qwen3_5 family."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.train_tiny.model import EPS, Shape, TinyLM
from tools.train_tiny.state import Progress

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def export_run(run: Path, folder: Path) -> Progress:
    """Write the averaged weights of a run, with its tokenizer; returns how far it was."""
    state: dict[str, Any] = torch.load(run / "state.pt", weights_only=True)
    tokenizer = Tokenizer.from_file(str(run / "tokenizer" / "tokenizer.json"))
    model = TinyLM(Shape(tokenizer.get_vocab_size()))
    model.load_state_dict(state["average"])
    export(model, run / "tokenizer", folder)
    return Progress(**state["progress"])


def export(model: TinyLM, tokenizer: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files.

    Args:
        model: its weights are written as ``dtype``.
        tokenizer: folder of the tokenizer and the chat template.
        folder: made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ends = [backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    name = str(dtype).removeprefix("torch.")
    _write(folder / "config.json", config_of(model.shape, ends[1], ends[0], name))
    # The likeliest token alone: greedy, in whatever reads this.
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 1}
    _write(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1], **sampling})
    weights = {key: value.to(dtype).contiguous() for key, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / file, folder / file)


def config_of(shape: Shape, pad: int, end: int, dtype: str) -> dict[str, Any]:
    """config.json as transformers' ``Qwen3_5TextConfig`` reads it."""
    sizes = asdict(shape)
    theta, partial = sizes.pop("rope_theta"), sizes.pop("partial_rotary_factor")
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    half = shape.rotary_dim // 2
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **sizes,
        "layer_types": [kinds[index % 4] for index in range(shape.num_hidden_layers)],
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "tie_word_embeddings": True,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": partial,
            # For text all three sections turn alike; they must add up to the rotary pairs.
            "mrope_section": [half - 2 * (half // 4), half // 4, half // 4],
        },
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": dtype,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
