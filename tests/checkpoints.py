"""Random-weight checkpoints made with transformers, and transformers as their oracle.

The weights are scaled so that logits spread and greedy answers vary; sizes are unequal everywhere, so that
a transposed layout cannot hide. Folders are cached for the session (and for all its processes) under the
system's temporary folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

VOCAB = 997

_ATTENTION = {"vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2,
              "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
_DELTA = {
    "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 40, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 24,
    "linear_value_head_dim": 40, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [2, 2, 1]},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention",
                    "full_attention"],
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {
        "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0,
                            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 256},
    }),
    "mistral": ("mistral", {
        "hidden_size": 80, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "sliding_window": None,
    }),
    "qwen3": ("qwen3", {
        "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 48, "tie_word_embeddings": True,
    }),
    "qwen3_5": ("qwen3_5_text", {**_DELTA, "intermediate_size": 208, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {
        **_DELTA, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 56,
        "shared_expert_intermediate_size": 72,
    }),
}  # fmt: skip
"""family -> (transformers' model type, config)"""

_LOGIT_SCALE = 3.0
"""Standard deviation of logits aimed at."""


def make_checkpoint(family: str, folder: Path | str, seed: int = 0) -> Path:
    """Write config.json and safetensors of a random model, float32, without tokenizer.

    Args:
        family: a key of ``FAMILIES``.
        folder: made when missing.
        seed: of the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**_ATTENTION, **settings}, dtype="float32")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config).eval()
        _scale(model)
    finally:
        torch.random.set_rng_state(state)
    folder = Path(folder)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _scale(model: Any) -> None:
    """Draw weights anew: large enough that layers matter, then scale the last norm to spread the logits.

    Attention alone needs larger weights and sharper scores than a hybrid, or greedy answers run in circles.
    """
    hybrid = "qwen3_5" in model.config.model_type
    gain, sharpness = (1.5, 0.0) if hybrid else (2.5, 1.5)
    for name, value in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value += sharpness + 0.2 * torch.randn_like(value)
        elif name.endswith("norm.weight"):
            value += 0.2 * torch.randn_like(value)
        elif name.endswith("dt_bias"):
            value.uniform_(-3.0, 1.0)
        elif name.endswith("A_log"):
            value.uniform_(-1.5, 1.0)
        elif name.endswith("bias"):
            value.normal_(std=0.1)
        elif "embed_tokens" in name:
            value.normal_(std=0.1)  # small beside what layers add: a tied head must not repeat its input
        elif "conv1d" in name:
            value.normal_(std=0.6)
        elif value.dim() >= 2:
            value.normal_(std=gain * value.shape[-1] ** -0.5)
    norm = model.model.norm.weight
    ids = torch.randint(3, VOCAB, (1, 64))
    spread = model(ids).logits.std()
    shift = 1.0 if hybrid else 0.0  # hybrids store w and mean 1 + w
    norm.copy_((norm + shift) * (_LOGIT_SCALE / spread) - shift)


def checkpoint(family: str, seed: int = 0) -> Path:
    """The cached folder of ``make_checkpoint(family, seed=seed)``; do not write to it."""
    folder = _cache() / f"{family}-{seed}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            made = make_checkpoint(family, Path(scratch) / "model", seed)
            try:
                os.rename(made, folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder


def copy_checkpoint(family: str, folder: Path | str, seed: int = 0, **changes: Any) -> Path:
    """A copy of the cached checkpoint for a test to change; ``changes`` go into its config.json."""
    folder = Path(folder)
    shutil.copytree(checkpoint(family, seed), folder, dirs_exist_ok=True)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@functools.cache
def oracle(folder: Path | str) -> Any:
    """transformers' model of a checkpoint, float32, for inference."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def oracle_logits(folder: Path | str, tokens: list[int] | tuple[int, ...]) -> torch.Tensor:
    """Logits float32 [len(tokens), vocabulary] of a prompt, by transformers."""
    logits: torch.Tensor = oracle(folder)(torch.tensor([list(tokens)])).logits[0]
    return logits.float()


@torch.inference_mode()
def oracle_greedy(folder: Path | str, tokens: list[int] | tuple[int, ...], count: int) -> list[int]:
    """The greedy answer of ``count`` tokens, end-of-sequence tokens not heeded, by transformers."""
    ids = torch.tensor([list(tokens)])
    out = oracle(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    answer: list[int] = out[0, len(tokens) :].tolist()
    return answer


def _cache() -> Path:
    """A folder that processes of one session share and that a changed recipe does not."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    session = os.environ.get("PLAIT_TEST_CACHE") or os.path.join(tempfile.gettempdir(), "plait-checkpoints")
    folder = Path(session) / recipe
    folder.mkdir(parents=True, exist_ok=True)
    return folder
