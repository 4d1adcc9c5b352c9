"""Weights and config from a GGUF file, in the names and layouts of Hugging Face checkpoints.

Only the Llama family is known (Mistral files call themselves "llama" too). Its files differ from the
checkpoints they were made from in three ways, all undone here:

* names: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``;
* the rows of q and k: rotary pairs (i, i + d/2) of a head were moved next to each other, to (2i, 2i + 1);
* long-context rotary factors are a tensor (``rope_freqs.weight``) and no numbers in the config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from plait.text.gguf_file import GgufError, GgufHeader, TensorEntry, read_header

__all__ = ["GgufError", "GgufSource", "gguf_config"]

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all Llama 3.1 to 3.3 models have; the file keeps only the factors that follow from it."""

_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
"""Tokens that end an answer in chat. Older files name one end token only, and not always the one of chat."""


class GgufSource:
    """The tensors of a GGUF file, a ``WeightSource``.

    The file is mapped, and a tensor is dequantised when it is asked for: quantised types to float32, while
    float32, float16 and bfloat16 stay as they are. ``blocks`` gives quantised matrices as they are.

    Raises:
        GgufError: the file is damaged or cut short, of an unknown architecture, or holds a tensor of an
            unknown name or type; the message names the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        header = read_header(path)
        self._path = header.path
        self._config = _config(header)
        self._data = np.memmap(header.path, mode="r", dtype=np.uint8)
        self._entries: dict[str, TensorEntry] = {}
        for entry in header.tensors.values():
            _check(header.path, entry, len(self._data))
            if entry.name != _ROPE_FACTORS:
                self._entries[_hf_name(header.path, entry.name)] = entry

    @property
    def config(self) -> dict[str, Any]:
        """As ``gguf_config``."""
        return dict(self._config)

    def names(self) -> Iterable[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def get(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        try:
            tensor = _tensor(self._data, entry)
        except Exception as fault:
            raise GgufError(f"{self._path}: tensor {entry.name} cannot be dequantised ({fault})") from fault
        return self._in_order(entry, tensor)

    def nbytes(self, name: str, formats: Collection[str] = ()) -> int:
        entry = self._entry(name)
        if _block_format(entry, formats) or GGMLQuantizationType(entry.type_id) in _FLOATS:
            return _stored_bytes(entry)
        return int(np.prod(entry.shape)) * torch.float32.itemsize

    def blocks(self, name: str, formats: Collection[str]) -> tuple[str, torch.Tensor] | None:
        entry = self._entry(name)
        format = _block_format(entry, formats)
        if format is None:
            return None
        stored = self._data[entry.offset : entry.offset + _stored_bytes(entry)]
        rows = torch.from_numpy(stored.copy()).view(entry.shape[0], -1)
        return format, self._in_order(entry, rows)

    def _in_order(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        """Rows as Hugging Face has them; what is inside a row does not matter."""
        heads = self._heads(entry.name)
        if heads is None:
            return tensor
        if tensor.shape[0] != heads * self._config["head_dim"]:
            raise GgufError(
                f"{self._path} is damaged: tensor {entry.name} has {tensor.shape[0]} rows for {heads} heads "
                f"of {self._config['head_dim']}; fetch it again"
            )
        return _unpermute(tensor, heads)

    def _heads(self, name: str) -> int | None:
        """Heads of a tensor whose rows were permuted; None for the others."""
        if ".attn_q." in name:
            return int(self._config["num_attention_heads"])
        return int(self._config["num_key_value_heads"]) if ".attn_k." in name else None

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise GgufError(f"{self._path} has no tensor {name}; it holds {len(self._entries)} others")
        return self._entries[name]


def gguf_config(path: str | Path) -> dict[str, Any]:
    """The model's config as Hugging Face's ``config.json`` has it.

    Raises:
        GgufError: the file is damaged, not of the Llama family, or needs what is not known here.
    """
    return _config(read_header(path))


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: those the metadata names, and the well-known ones of chat."""
    named = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        tokens, types = [], []
    known = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _END_TOKENS and kind == 3
    ]
    return tuple(dict.fromkeys(i for i in (*named, *known) if i is not None))


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id that the metadata give for "bos", "eos", ..., or None."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and value >= 0 else None


def _hf_name(path: Path, name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise GgufError(
            f"{path} holds the tensor {name!r}, which no Llama model has; use the model's folder with "
            "safetensors files"
        )
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"


def _check(path: Path, entry: TensorEntry, file_size: int) -> None:
    """Type, row length and place of one tensor."""
    kind = _kind(path, entry)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = 1
    for size in entry.shape:
        elements *= size
    if not entry.shape or elements == 0 or entry.shape[-1] % block:
        raise GgufError(
            f"{path} is damaged: tensor {entry.name} has shape {list(entry.shape)}, whose rows are no "
            f"multiple of {kind.name}'s blocks of {block}; fetch it again"
        )
    end = entry.offset + elements // block * block_bytes
    if end > file_size:
        raise GgufError(
            f"{path} is cut short: tensor {entry.name} ends at byte {end:,}, the file at {file_size:,}; "
            "fetch it again"
        )


def _kind(path: Path, entry: TensorEntry) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(entry.type_id)
        if kind not in _FLOATS:
            # The library tells what it can dequantise only when asked to; one block of zeros will do.
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8).reshape(1, -1), kind)
    except (ValueError, KeyError, NotImplementedError) as fault:
        raise GgufError(
            f"{path}: tensor {entry.name} has the type {entry.type_id}, which cannot be dequantised "
            f"({fault}); use a file with another quantisation, such as Q8_0 or Q4_K_M"
        ) from fault
    return kind


def _stored_bytes(entry: TensorEntry) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(entry.type_id)]
    return int(np.prod(entry.shape)) // block * block_bytes


def _block_format(entry: TensorEntry, formats: Collection[str]) -> str | None:
    """The format of a matrix of blocks, if it is one of ``formats``."""
    name = GGMLQuantizationType(entry.type_id).name.lower()
    return name if name in formats and len(entry.shape) == 2 else None


def _tensor(data: np.ndarray, entry: TensorEntry) -> torch.Tensor:
    """One tensor as the file orders it, of shape ``entry.shape``."""
    kind = GGMLQuantizationType(entry.type_id)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = int(np.prod(entry.shape[:-1])), entry.shape[-1]
    row_bytes = columns // block * block_bytes
    packed = data[entry.offset : entry.offset + rows * row_bytes]
    if kind in _FLOATS:
        # A copy: a tensor that lay on the read-only map could be written to and crash the process.
        return torch.from_numpy(packed.copy()).view(_FLOATS[kind]).view(entry.shape)
    values = dequantize(packed.reshape(rows, row_bytes), kind)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(entry.shape)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (or biases) of q or k back from rotary pairs side by side to first half, second half of a head."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _config(header: GgufHeader) -> dict[str, Any]:
    reader = _Metadata(header)
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise GgufError(
            f"{header.path} holds a model of the architecture {architecture!r} (general.architecture); GGUF "
            "files are read for 'llama' only (Llama, Mistral, SmolLM2). Use the model's folder with "
            "safetensors files"
        )
    if header.metadata.get("llama.expert_count"):
        raise GgufError(f"{header.path} holds a mixture of experts (llama.expert_count), which is not read")
    heads, width = reader.integer("attention.head_count"), reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.integer(key, head_dim) != head_dim:
            raise GgufError(
                f"{header.path}: llama.{key} is {reader.integer(key)} and the size of a head {head_dim}; "
                "only models in which they are equal are read"
            )
    embedding = reader.tensor("token_embd.weight")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.integer("context_length"),
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": reader.real("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": reader.real("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(reader, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": reader.all_or_none("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": reader.all_or_none("ffn_gate", "ffn_up", "ffn_down"),
        "dtype": str(_FLOATS.get(_kind(header.path, embedding), torch.float32)).removeprefix("torch."),
        "bos_token_id": token_id(header.metadata, "bos"),
        "eos_token_id": list(end_token_ids(header.metadata)),
        "pad_token_id": token_id(header.metadata, "padding"),
    }


class _Metadata:
    """Reads the metadata of one Llama file; what is missing or of the wrong kind is an error by name."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def _get(self, key: str, default: Any, check: Callable[[Any], bool], kind: str) -> Any:
        value = self.header.metadata.get(f"llama.{key}", default)
        if value is None:
            raise GgufError(f"{self.header.path} is damaged: its metadata has no llama.{key}; fetch it again")
        if not check(value):
            raise GgufError(
                f"{self.header.path} is damaged: llama.{key} is {value!r}, not {kind}; fetch it again"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(
            self._get(key, default, lambda v: isinstance(v, int) and v > 0, "a whole number from 1 up")
        )

    def real(self, key: str, default: float) -> float:
        """Numbers are stored in float32; the shortest decimal that gives the same one is what was meant."""
        value = self._get(key, default, lambda v: isinstance(v, float) and v > 0, "a number above 0")
        return float(str(np.float32(value)))

    def tensor(self, name: str) -> TensorEntry:
        if name not in self.header.tensors:
            raise GgufError(
                f"{self.header.path} has no tensor {name}; if it is one part of several, join them"
            )
        return self.header.tensors[name]

    def all_or_none(self, *parts: str) -> bool:
        """Whether these layers have biases, in layer 0."""
        found = [part for part in parts if f"blk.0.{part}.bias" in self.header.tensors]
        if found and len(found) != len(parts):
            raise GgufError(
                f"{self.header.path} has biases for {', '.join(found)} only, as no Llama model has"
            )
        return bool(found)


def _rope_scaling(reader: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """The config's ``rope_scaling``: from the factors tensor (Llama 3), else from the metadata."""
    header = reader.header
    if _ROPE_FACTORS in header.tensors:
        return _llama3_scaling(reader, head_dim)
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise GgufError(
            f"{header.path} scales rotary positions by {kind!r} (llama.rope.scaling.type), not known here"
        )
    return {"rope_type": "linear", "factor": reader.real("rope.scaling.factor", 1.0)}


def _llama3_scaling(reader: _Metadata, head_dim: int) -> dict[str, Any]:
    """Find the numbers from which the file's factors were made, and check that they give the same factors.

    Formula: transformers' ``_compute_llama3_parameters`` (modeling_rope_utils.py), where a factor is the old
    frequency divided by the new one.
    """
    header, entry = reader.header, reader.tensor(_ROPE_FACTORS)
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    _check(header.path, entry, len(data))
    factors = _tensor(data, entry).to(torch.float64).flatten()
    theta = reader.real("rope.freq_base", 10_000.0)
    # Six digits: the factor was a round number before it was float32.
    scaling = {"rope_type": "llama3", "factor": float(f"{factors.max().item():.6g}"), **_LLAMA3_ROPE}
    expected = _llama3_factors(theta, head_dim, scaling)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4, atol=0):
        raise GgufError(
            f"{header.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3.1 to 3.3; use the "
            "model's folder with safetensors files"
        )
    return scaling


def _llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Old over new frequency for each rotary pair, shape [head_dim / 2]."""
    frequencies = torch.pow(theta, -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.reciprocal((1 - smooth) / scaling["factor"] + smooth)
