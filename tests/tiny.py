"""Small tokenizers and GGUF files, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Numbers: 1, 22, 333 and 4,444.50. It's what they'll say; we've heard I'm late.",
    "Der Bär läuft über die Straße. Où est la bibliothèque? El niño comió piñata.",
    "日本語のテキストと漢字。こんにちは世界。한국어 문장입니다. Привет, мир! नमस्ते दुनिया।",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "🎉🏳️‍🌈👩‍👩‍👧 emoji, and e\u0301 combining, and   runs   of    spaces\n\n\nand lines",
] * 4

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "It's 12345 dogs, isn't it?\n\n  x",
    "naïve café — “quotes” … ﬁ",
    "日本語、漢字。한국어 문장 Привет नमस्ते",
    "🏳️‍🌈👩‍👩‍👧‍👦 e\u0301 \u00a0 \u2028 \ufffd",
    "a <s> b </s>c",
]

SPECIAL = ("<unk>", "<s>", "</s>")


def byte_level() -> Tokenizer:
    """Byte-level BPE of 500 tokens. The first are ``SPECIAL`` and "<tool>", which is not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIAL, "<tool>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # As model files do it: training leaves all of them special.
    spec = json.loads(backend.to_str())
    spec["added_tokens"][3]["special"] = False
    return Tokenizer.from_str(json.dumps(spec))


def sentencepiece() -> Tokenizer:
    """BPE in SentencePiece's manner, of 600 tokens: a marker for spaces, one in front, and byte tokens."""
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    base.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    first = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    base.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    )
    trained = json.loads(base.to_str())["model"]
    backend = Tokenizer(
        models.BPE(
            vocab=trained["vocab"],
            merges=[tuple(m) for m in trained["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = base.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save(backend: Tokenizer, folder: Path, **config: Any) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json, as ``AutoTokenizer`` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def tokenizer_metadata(backend: Tokenizer, kind: str, pre: str = "gpt-2") -> dict[str, Any]:
    """The ``tokenizer.*`` metadata with which a GGUF file describes ``backend``."""
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    added = backend.get_added_tokens_decoder()
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    metadata: dict[str, Any] = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens}
    if kind == "llama":
        types = [6 if t.startswith("<0x") and len(t) == 6 else k for t, k in zip(tokens, types, strict=True)]
        types[0] = 2
        # In training order, so that the token joined first has the highest score.
        metadata["tokenizer.ggml.scores"] = [-float(i) for i in range(len(tokens))]
    else:
        merges = json.loads(backend.to_str())["model"]["merges"]
        metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
        metadata["tokenizer.ggml.pre"] = pre
    metadata["tokenizer.ggml.token_type"] = types
    ids = {"unknown": 0, "bos": 1, "eos": 2}
    return metadata | {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}


LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
}
"""Metadata of a small Llama model with 4 query and 2 key-value heads of 16."""


def llama_tensors(vocab_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights for ``LLAMA``, by their names in a GGUF file, in float32."""
    random = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, 64),
        "output_norm.weight": (64,),
        "output.weight": (vocab_size, 64),
    }
    for i in range(2):
        layer = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        layer |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"blk.{i}.attn_norm.weight": (64,), f"blk.{i}.ffn_norm.weight": (64,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a GGUF file; matrices are stored as ``kind``, vectors in float32."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        elif kind == GGMLQuantizationType.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
