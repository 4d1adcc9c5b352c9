"""The tokenizer that an engine's settings name."""

from __future__ import annotations

from pathlib import Path

from plait.config import EngineArgs
from plait.models.hub import resolve_model
from plait.text.tokenizer import Tokenizer


def load_tokenizer(args: EngineArgs, path: Path) -> Tokenizer | None:
    """The tokenizer of the model at ``path``, or the one that was asked for; None: there shall be none."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        return Tokenizer.load(path)
    return Tokenizer.load(resolve_model(args.tokenizer, args.revision, args.download_dir))
