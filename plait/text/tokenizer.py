"""Text to token ids and back, for a model folder or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from plait.text.detokenizer import Detokenizer, TokenizerError

__all__ = ["Tokenizer", "TokenizerError"]

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of one model.

    Args:
        backend: the rules for splitting and merging.
        bos_token, eos_token, pad_token, unk_token: as the model's files name them; a name that the vocabulary
            does not hold counts as absent.
        special_tokens: further tokens that are no text (they are hidden by ``skip_special_tokens``).
        chat_templates: name to Jinja source; "default" is the one used without tools.

    Attributes:
        vocab_size: number of token ids; ids run from 0 to ``vocab_size - 1``. The model's logits may have
            more columns, whose ids have no text.
        special_ids: ids of all special tokens.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        special_tokens: Iterable[str] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.bos_token, self.bos_token_id = self._known(bos_token)
        self.eos_token, self.eos_token_id = self._known(eos_token)
        self.pad_token, self.pad_token_id = self._known(pad_token)
        self.unk_token, self.unk_token_id = self._known(unk_token)
        named = [self.bos_token, self.eos_token, self.pad_token, self.unk_token, *special_tokens]
        # A model's own special tokens count as special even where tokenizer.json forgot to say so. Names
        # outside the vocabulary are left out: adding them would make ids that the model does not have.
        known = [t for t in dict.fromkeys(named) if t and backend.token_to_id(t) is not None]
        backend.add_special_tokens(known)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.chat_templates = dict(chat_templates or {})
        self.detokenizer = Detokenizer(backend)

    def _known(self, token: str | None) -> tuple[str | None, int | None]:
        token_id = None if token is None else self.backend.token_to_id(token)
        return (None, None) if token_id is None else (token, token_id)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a model folder, or in a GGUF file.

        Raises:
            TokenizerError: none is there, or it cannot be read or used; the message says what was looked for.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            from plait.text.gguf_tokenizer import tokenizer_from_gguf

            return tokenizer_from_gguf(path)
        if (path / "tokenizer.json").is_file():
            return _load_folder(path)
        inside = sorted(path.glob("*.gguf"))
        if len(inside) == 1:
            return cls.load(inside[0])
        raise TokenizerError(_nothing_found(path, inside))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the template used without tools, or None."""
        return self.chat_templates.get("default")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """A conversation as the model's chat template writes it; arguments as in transformers.

        Returns:
            Its token ids, or its text if not ``tokenize``.

        Raises:
            ChatError: there is no template, or it refuses the messages.
        """
        from plait.text.chat import ChatTemplate

        text = ChatTemplate.of(self).render(
            list(conversation), tools, add_generation_prompt, continue_final_message, **template_kwargs
        )
        return self.encode_chat(text) if tokenize else text

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens as chat templates see them: ``bos_token``, ``eos_token``, ..."""
        return {name: token for name in NAMED_TOKENS if (token := getattr(self, name)) is not None}

    def token_id(self, token: str) -> int | None:
        """The id of a token given exactly as the vocabulary spells it, or None."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written out in the text become those tokens.

        ``add_special_tokens`` adds what the model expects around a raw prompt: often a bos token, often
        nothing. tokenizer.json says so; ``add_bos_token`` in tokenizer_config.json does not count beside it,
        as in transformers 5.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of what a chat template rendered. Templates write their special tokens, bos included, as
        text, so none is added."""
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD; unknown ids are skipped.

        Equal to the ``tokenizers`` library's result, except where a run of SentencePiece byte tokens is
        partly invalid: there the valid characters are kept (as SentencePiece itself does), because
        discarding the whole run would mean taking back text that was already streamed.
        """
        if skip_special_tokens:
            token_ids = (i for i in token_ids if i not in self.special_ids)
        return self.detokenizer.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds in the middle of a text; special tokens as they are written, b"" for ids
        beyond the vocabulary."""
        return self.detokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, for showing one token by itself; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """``token_text`` of each id."""
        return [self.token_text(i) for i in token_ids]


def _load_folder(folder: Path) -> Tokenizer:
    try:
        return _read_folder(folder)
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as fault:
        raise TokenizerError(
            f"a tokenizer file in {folder} has a field of the wrong kind: {fault}"
        ) from fault


def _read_folder(folder: Path) -> Tokenizer:
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as fault:  # the library raises plain Exception
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} cannot be read ({fault}); "
            "fetch it again, or upgrade the tokenizers package"
        ) from fault
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    named = {name: _content(config.get(name)) for name in NAMED_TOKENS}
    special = [_content(t) for t in _as_list(config.get("additional_special_tokens"))]
    special += [t.get("content") for t in _as_list(config.get("added_tokens_decoder")) if t.get("special")]
    templates = read_templates(config.get("chat_template"))
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    elif not templates:
        templates = read_templates(_read_json(folder / "chat_template.json").get("chat_template"))
    return Tokenizer(
        backend, **named, special_tokens=[t for t in special if t is not None], chat_templates=templates
    )


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make ``encode`` put ``bos`` before and ``eos`` after a text (None: nothing)."""
    tokens = [t for t in (bos, eos) if t is not None]
    ids = {t: backend.token_to_id(t) for t in tokens}
    missing = [t for t, i in ids.items() if i is None]
    if missing:
        raise TokenizerError(f"the tokenizer is to add {missing[0]!r} to texts, but has no such token")
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=list(ids.items()))


def read_templates(value: Any) -> dict[str, str]:
    """Chat templates as files give them: one source, or a list of ``{"name": ..., "template": ...}``."""
    if isinstance(value, str):
        return {"default": value}
    return {entry["name"]: entry["template"] for entry in value or []}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise TokenizerError(f"{file} is no valid JSON ({fault}); fetch it again") from fault
    if not isinstance(data, dict):
        raise TokenizerError(f"{file} must hold a JSON object, not a {type(data).__name__}; fetch it again")
    return data


def _content(token: Any) -> str | None:
    """A token is given as a string, or as an object with a ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _as_list(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value or [])


def _nothing_found(path: Path, gguf_files: Sequence[Path]) -> str:
    if not path.exists():
        return f"no tokenizer: {path} does not exist"
    if gguf_files:
        names = ", ".join(f.name for f in gguf_files)
        return f"no tokenizer: {path} has no tokenizer.json but several GGUF files ({names}); name one"
    hint = ""
    if (path / "tokenizer.model").is_file():
        hint = (
            " There is a tokenizer.model, which is not read: write a tokenizer.json with"
            " transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return (
        f"no tokenizer in {path}: looked for tokenizer.json and for a .gguf file.{hint} Put the model's "
        "tokenizer files there, or set skip_tokenizer_init and pass token ids"
    )
