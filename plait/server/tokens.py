"""``/tokenize`` and ``/detokenize``: what a prompt is made of."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from plait.server.errors import APIError
from plait.server.prompts import Turn
from plait.server.protocol import Body
from plait.server.service import Service
from plait.server.tools import toolbox


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    example: ClassVar[dict[str, Any]] = {"prompt": "Once upon a time"}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    example: ClassVar[dict[str, Any]] = {"tokens": [72, 105]}

    model: str | None = None
    tokens: list[int] = Field(max_length=10**7)


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
