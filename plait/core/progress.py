"""What a step did for a request: the tokens of its answer, and whether they ended it."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.orders import Offer
from plait.core.plan import ChunkResult, TokenLogprobs
from plait.core.request import Request


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one request, for whoever waits on it."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """all of the prompt's, with the first token"""
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    offer: Offer | None = None
    """the prompt is computed and another engine may go on from here"""


def append_tokens(request: Request, chunk: ChunkResult) -> Progress:
    """Append what was sampled to the answer, up to the token that ends it."""
    first = request.num_output_tokens == 0
    taken, reason, stop = 0, None, None
    for token in chunk.tokens:
        request.tokens.append(token)
        taken += 1
        reason, stop = _end(request, token)
        if reason is not None:
            break
    return Progress(
        request_id=request.id,
        tokens=chunk.tokens[:taken],
        logprobs=chunk.logprobs[:taken],
        prompt_logprobs=tuple(request.prompt_logprobs) if first and not request.reads_cache else None,
        finish_reason=reason,
        stop_reason=stop,
        num_cached_tokens=request.num_cached_tokens or 0,
    )


def _end(request: Request, token: int) -> tuple[str | None, int | None]:
    """Whether ``token`` ends the answer: (reason, the caller's stop token id if it was one)."""
    if token in request.end_token_ids and request.num_output_tokens >= request.params.min_tokens:
        return "stop", token if token in (request.params.stop_token_ids or ()) else None
    if request.num_output_tokens >= request.max_tokens:
        return "length", None
    return None, None
