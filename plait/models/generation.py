"""What a model's makers say about sampling from it, and about the tokens that end an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.sampling_params import SamplingParams
from plait.models.gguf import end_token_ids, token_id
from plait.text.gguf_file import read_header
from plait.text.tokenizer import Tokenizer, TokenizerError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class GenerationConfigError(ValueError):
    """generation_config.json or config.json cannot be read; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of one model; a sampling default is None where its makers give none."""

    eos_token_ids: tuple[int, ...] = ()
    """every token that ends an answer, in no order"""
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling(self) -> dict[str, float | int]:
        """The defaults that were given, by the names of ``SamplingParams``."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        return {name: value for name, value in given.items() if value is not None}


def generation_config(path: str | Path, tokenizer: Tokenizer | None = None) -> GenerationDefaults:
    """Read the defaults of a model folder or GGUF file.

    The tokens that end an answer are those of generation_config.json, of config.json and of the tokenizer
    together: checkpoints often name the end of a document in one and the end of a turn in the other.

    Args:
        path: as ``resolve_model`` gives it.
        tokenizer: the model's, if it is loaded already; else it is loaded here, where there is one.

    Raises:
        GenerationConfigError: a file is damaged.
        GgufError: the GGUF file is damaged.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        metadata = read_header(path).metadata
        return GenerationDefaults(end_token_ids(metadata), token_id(metadata, "bos"))
    config = _read(path / "config.json")
    given = _read(path / "generation_config.json")
    text = config.get("text_config")
    sources = [given, config, text if isinstance(text, dict) else {}]
    ends = [i for source in sources for i in _ids(source.get("eos_token_id"), path)]
    if tokenizer is None:
        tokenizer = _tokenizer(path)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    bos = next((source["bos_token_id"] for source in sources if source.get("bos_token_id") is not None), None)
    sampling = {name: _number(given.get(name), name, path) for name in _SAMPLING}
    defaults = GenerationDefaults(tuple(dict.fromkeys(ends)), bos, **sampling)
    try:
        SamplingParams(**defaults.sampling())  # type: ignore[arg-type]
    except ValueError as fault:
        raise GenerationConfigError(f"{path / 'generation_config.json'}: {fault}") from fault
    return defaults


def _tokenizer(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(path)
    except TokenizerError:
        return None


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise GenerationConfigError(f"{file} is no valid JSON ({fault}); fetch it again") from fault
    if not isinstance(data, dict):
        raise GenerationConfigError(f"{file} must hold a JSON object; fetch it again")
    return data


def _ids(value: Any, path: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise GenerationConfigError(
            f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them"
        )
    return ids


def _number(value: Any, name: str, path: Path) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise GenerationConfigError(
            f"{path / 'generation_config.json'}: {name} is {value!r}; it must be a number"
        )
    if name == "top_k" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
