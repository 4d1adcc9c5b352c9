"""``/tokenize`` and ``/detokenize``: what a prompt is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.server.errors import APIError
from plait.server.prompts import Turn
from plait.server.protocol import only_served
from plait.server.service import Service
from plait.server.tools import toolbox


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, data: Any) -> Any:
        return only_served(data, list(cls.model_fields), {})


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: list[int] = Field(max_length=10**7)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, data: Any) -> Any:
        return only_served(data, list(cls.model_fields), {})


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text or of a conversation, and how many fit."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either prompt or messages", "prompt")
    if body.prompt is not None:
        ids = (await service.encode(body.prompt, body.add_special_tokens is not False)).token_ids
    else:
        if body.add_special_tokens:
            message = "add_special_tokens is for prompt: chat templates write the special tokens themselves"
            raise APIError(400, message, "add_special_tokens")
        turn = Turn(
            body.messages or [],
            toolbox(body.tools),
            body.chat_template_kwargs,
            body.add_generation_prompt,
            body.continue_final_message,
        )
        ids = (await service.render(turn)).token_ids
    texts = service.tokenizer().token_texts(ids) if body.return_token_strs else None
    limit = service.engine.info.max_model_len
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens written out."""
    service.check_model(body.model)
    limit = service.engine.info.vocab_size
    bad = next((token for token in body.tokens if not 0 <= token < limit), None)
    if bad is not None:
        raise APIError(400, f"tokens: id {bad} is outside the vocabulary of {limit}", "tokens")
    return {"prompt": service.tokenizer().decode(body.tokens, skip_special_tokens=False)}
