"""The tokenizer: byte-level BPE over training text, with Qwen's special tokens.

A line end, a digit and a run of marks are pieces of their own, so that text means the same tokens wherever a
prompt is cut; a word goes with the space before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own, but text: they are not left out when an answer is read."""

_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from texts, in which tags may occur."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(spec))


def save(backend: Tokenizer, folder: Path) -> None:
    """tokenizer.json and its config, as ``AutoTokenizer`` reads them, with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
