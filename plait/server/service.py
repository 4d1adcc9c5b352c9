"""What every endpoint needs: the engine, its names and defaults, and prompts as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plait.server.errors import APIError
from plait.server.logprobs import LogprobFormatter
from plait.server.metrics import ServerMetrics
from plait.server.protocol import ChatRequest, Request
from plait.server.settings import ServerSettings
from plait.text.boundaries import Boundaries
from plait.text.chat import ChatError
from plait.text.conversation import encode_conversation

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine
    from plait.text.tokenizer import Tokenizer

T = TypeVar("T")

_LONG_TEXT = 20_000
"""characters from which a text is tokenized beside the event loop: below, a thread costs more"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the text it came from where there was one."""

    token_ids: list[int]
    text: str | None = None
    boundaries: Boundaries = field(default_factory=Boundaries)


class Service:
    """An engine and what the server knows about it."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings):
        self.engine = engine
        self.settings = settings
        self.model = engine.info.model
        self.metrics = ServerMetrics(self.model)
        self.logprobs = LogprobFormatter(engine.tokenizer)
        self.defaults: dict[str, Any] = engine.info.generation_defaults.sampling()

    def check(self, body: Request) -> None:
        """Refuse what this server, started as it is, does not serve.

        Raises:
            APIError: another model, a priority where there are none, or a token id that does not exist.
        """
        self.check_model(body.model)
        limit = self.engine.info.vocab_size
        for token in body.logit_bias or ():
            if token.isdecimal() and (len(token) > 10 or int(token) >= limit):
                token = token[:12]
                message = f"logit_bias names token id {token}: the vocabulary has {limit} tokens"
                raise APIError(400, message, "logit_bias")
        if body.priority and not self.settings.priorities:
            message = f"priority={body.priority}: the server runs requests in order of arrival"
            raise APIError(400, f"{message}; start it with --scheduling-policy priority", "priority")

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.model:
            message = f"model {asked!r} is not served here; this server has {self.model!r}"
            raise APIError(404, message, "model", "model_not_found")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, for requests that need text.

        Raises:
            APIError: the engine runs without one.
        """
        if self.engine.tokenizer is None:
            message = "the server runs with --skip-tokenizer-init: send token ids to /v1/completions"
            raise APIError(400, message, "prompt")
        return self.engine.tokenizer

    async def encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        """Token ids of a prompt of the completions endpoint."""
        if isinstance(prompt, list):
            return Prompt(prompt)
        tokenizer = self.tokenizer()
        ids = await _beside(
            lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens), len(prompt)
        )
        return Prompt(ids, prompt)

    async def render(self, body: ChatRequest) -> Prompt:
        """Token ids of a conversation.

        Raises:
            APIError: the messages, or the template's complaint about them.
        """
        template = self.engine.chat_template
        tokenizer = self.tokenizer()
        if template is None:
            message = "the model has no chat template: start with --chat-template, or use /v1/completions"
            raise APIError(400, message, "messages")
        try:
            length = sum(len(str(message.get("content"))) for message in body.messages)
            conversation = await _beside(
                lambda: encode_conversation(
                    template,
                    tokenizer,
                    body.messages,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    **self.settings.default_chat_template_kwargs | body.chat_template_kwargs,
                ),
                length,
            )
        except ChatError as error:
            raise APIError(400, str(error), "messages") from None
        except UnicodeError:
            raise APIError(400, "messages hold an unpaired surrogate, which is no text", "messages") from None
        return Prompt(conversation.tokens, conversation.text, conversation.boundaries)


async def _beside(work: Callable[[], T], length: int) -> T:
    if length < _LONG_TEXT:
        return work()
    return await asyncio.to_thread(work)
