"""A model as far as it is known without its weights: where it lies, and how text becomes tokens and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.config import ConfigError, EngineArgs, check_types
from plait.engine.beside import beside
from plait.engine.resolve import model_config
from plait.engine.tokenizer import load_tokenizer
from plait.models.generation import GenerationDefaults, generation_config
from plait.models.hub import resolve_model
from plait.text.chat import ChatError, ChatTemplate
from plait.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """``path`` of the model, the ``family`` that its config names, and what text goes through."""

    path: Path
    family: str
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults

    @classmethod
    async def load(cls, args: EngineArgs, stage: Callable[[str], None] = lambda text: None) -> ModelText:
        """Find the model and read all this.

        Raises:
            ConfigError: settings of the wrong kind.
            ValueError: a model, tokenizer or template that cannot be served; all say what to do.
        """
        check_types(args)
        stage("finding the model")
        path = await beside(resolve_model, args.model, args.revision, args.download_dir)
        # A model that cannot be served is said before anything about its tokenizer.
        config = model_config(path)
        stage("loading the tokenizer")
        tokenizer = await beside(load_tokenizer, args, path)
        template = _chat_template(args, tokenizer)
        return cls(path, config.architecture, tokenizer, template, generation_config(path, tokenizer))


def _chat_template(args: EngineArgs, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The template that was given, else the model's, else None."""
    if tokenizer is None:
        return None
    given = args.chat_template
    if given is not None:
        if "{" not in given and "\n" not in given:
            try:
                given = Path(given).read_text(encoding="utf-8")
            except OSError as fault:
                raise ConfigError(f"chat_template={given!r} cannot be read: {fault.strerror}") from fault
        return ChatTemplate(given, tokenizer.special_tokens_map)
    try:
        return ChatTemplate.of(tokenizer)
    except ChatError:
        if tokenizer.chat_templates:
            raise
        return None
