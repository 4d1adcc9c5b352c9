"""What an answer looks like to callers; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class EngineDeadError(RuntimeError):
    """The engine process has ended; every request that waited on it gets this."""


class RequestRefused(ValueError):
    """The request cannot be served as asked; the message says why and what would work."""


class RequestFailed(RuntimeError):
    """The model gave nothing usable for the request; others are not touched."""


class NobodyReads(RequestFailed):
    """The caller has not taken what there was of its answer, and too much of it was held."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, from the raw logits (before temperature, penalties and bias)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionDelta:
    """What was added to one answer since the last delta. The first one of a request may be empty."""

    index: int
    """which of the ``n`` answers"""
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    """None while it goes on; "stop", "length" or "abort" with the last delta"""
    stop_reason: int | str | None
    """the stop string or stop token id that ended it (None for the model's own end token)"""
    num_cached_tokens: int
    """prompt tokens that came from the prefix cache"""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """with the first delta of answer 0, if asked for: None for position 0, then one per prompt token"""
    starts: tuple[int, ...] = ()
    """for each token, the number of its first character in the answer's text (empty without text)"""
    kv_transfer_params: dict[str, Any] | None = None
    """with the last delta of a request that was computed for another engine: to be handed to that"""
    queued: float | None = None
    """with the first delta of an answer: seconds that it waited until it took part in steps"""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    starts: list[int] = field(default_factory=list)
    """for each token, the number of its first character in ``text`` (empty without text)"""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds from arrival."""

    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    """of a request that was computed for another engine: to be handed to that"""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
