"""A tokenizer from the metadata of a GGUF file.

Two kinds exist there (``tokenizer.ggml.model``): "gpt2" is byte-level BPE with merges, and "llama" is
SentencePiece BPE with a score for each token in place of merges.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from plait.text.detokenizer import TokenizerError
from plait.text.gguf_file import GgufError, read_header
from plait.text.pre_tokenizers import RULES, PreTokenizerRule
from plait.text.tokenizer import Tokenizer, set_bos_eos

_SPACE = "▁"
_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(path: str | Path) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises:
        TokenizerError: the file cannot be read, has no tokenizer, or one of an unknown kind.
    """
    try:
        metadata = read_header(path).metadata
    except GgufError as fault:
        raise TokenizerError(f"no tokenizer: {fault}") from fault
    return tokenizer_from_metadata(metadata, str(path))


def tokenizer_from_metadata(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """As ``tokenizer_from_gguf``, from the metadata; ``where`` names their origin in messages."""
    vocabulary = _Vocabulary(metadata, where)
    kind = metadata.get(_PREFIX + "model")
    if kind == "gpt2":
        rule = _rule(metadata.get(_PREFIX + "pre"), where)
        backend, adds_bos = _byte_level(vocabulary, rule), rule.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise TokenizerError(
            f"{where} has a tokenizer of the kind {kind!r} (tokenizer.ggml.model); known are 'gpt2' and "
            "'llama'. Use the model's folder with tokenizer.json instead"
        )
    backend.add_special_tokens(vocabulary.added(TokenType.CONTROL))
    backend.add_tokens(vocabulary.added(TokenType.USER_DEFINED))
    bos, eos = vocabulary.named("bos"), vocabulary.named("eos")
    add_bos = bos is not None and metadata.get(_PREFIX + "add_bos_token", adds_bos)
    add_eos = eos is not None and metadata.get(_PREFIX + "add_eos_token", False)
    set_bos_eos(backend, bos if add_bos else None, eos if add_eos else None)
    return Tokenizer(
        backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=vocabulary.named("padding"),
        unk_token=vocabulary.named("unknown"),
        chat_templates=_templates(metadata),
    )


class _Vocabulary:
    """Tokens, types and scores, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        tokens = metadata.get(_PREFIX + "tokens")
        if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise TokenizerError(
                f"{where} has no tokenizer (no tokenizer.ggml.tokens); use a file that has one, or set "
                "skip_tokenizer_init and pass token ids"
            )
        # Tokens without text are placeholders; they need names to keep their ids.
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise TokenizerError(
                f"{where} is damaged: the token {twice!r} is in its vocabulary twice; fetch it again"
            )
        self.types = self._column("token_type") or [TokenType.NORMAL] * len(self.tokens)

    def _column(self, name: str) -> Sequence[Any] | None:
        column: list[Any] | None = self.metadata.get(_PREFIX + name)
        if column is None:
            return None
        size = len(column) if isinstance(column, list) else 0
        if size != len(self.tokens) or not all(isinstance(value, int | float) for value in column):
            raise TokenizerError(
                f"{self.where} is damaged: {len(self.tokens)} tokens, but {size} numbers in "
                f"tokenizer.ggml.{name}; fetch it again"
            )
        return column

    def scores(self) -> Sequence[float]:
        scores = self._column("scores")
        if scores is None:
            raise TokenizerError(
                f"{self.where} has a SentencePiece vocabulary without scores (tokenizer.ggml.scores), with "
                "which no text can be cut; convert the model again"
            )
        return scores

    def added(self, kind: TokenType) -> list[AddedToken]:
        """Tokens of one type, to be found whole wherever a text spells them."""
        special = kind == TokenType.CONTROL
        return [
            AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(self.tokens, self.types, strict=True)
            if type_ == kind
        ]

    def named(self, name: str) -> str | None:
        """The token whose id is in the metadata as ``<name>_token_id``."""
        token_id = self.metadata.get(f"{_PREFIX}{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]


def _rule(name: str | None, where: str) -> PreTokenizerRule:
    if not name:
        warnings.warn(
            f"{where} does not say how text is cut into words (no tokenizer.ggml.pre); the rule 'default' is "
            "used, and token ids may differ from the model's own. Convert the model again to be sure",
            stacklevel=4,
        )
        return RULES["default"]
    if not isinstance(name, str) or name not in RULES:
        raise TokenizerError(
            f"{where} cuts text into words by the rule {name!r} (tokenizer.ggml.pre), which is unknown; "
            f"known are {', '.join(sorted(RULES))}. Use the model's folder with tokenizer.json instead"
        )
    return RULES[name]


def _byte_level(vocabulary: _Vocabulary, rule: PreTokenizerRule) -> Backend:
    merges = vocabulary.metadata.get(_PREFIX + "merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise TokenizerError(
            f"{vocabulary.where} has a byte-level vocabulary without merges (tokenizer.ggml.merges), with "
            "which no text can be cut; convert the model again"
        )
    # A token may itself begin with a space in very old files, hence the search from 1.
    pairs = [(merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :]) for merge in merges]
    backend = Backend(_bpe(vocabulary, pairs, ignore_merges=rule.whole_words))
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    """As in SentencePiece and llama.cpp, each stretch of text between special tokens gets a space first."""
    unknown = vocabulary.named("unknown")
    backend = Backend(
        _bpe(vocabulary, _merges_by_score(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = vocabulary.metadata.get(_PREFIX + "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the tokens with the highest score first.

    SentencePiece joins whichever neighbours give the token with the highest score, which is what merges in
    this order do.
    """
    normal = {
        t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.NORMAL
    }
    merges = [
        (-score, cut, token)
        for token, score in zip(vocabulary.tokens, vocabulary.scores(), strict=True)
        if token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges.sort(key=lambda merge: (merge[0], -merge[1]))
    return [(token[:cut], token[cut:]) for _, cut, token in merges]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as fault:  # the library raises plain Exception
        raise TokenizerError(
            f"{vocabulary.where} is damaged: its merges do not fit its vocabulary ({fault}); fetch it again"
        ) from fault


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """``tokenizer.chat_template`` is the default one; others have their name behind it."""
    base = "tokenizer.chat_template"
    found = {key: value for key, value in metadata.items() if key.startswith(base) and isinstance(value, str)}
    return {key.removeprefix(base).removeprefix(".") or "default": value for key, value in found.items()}
