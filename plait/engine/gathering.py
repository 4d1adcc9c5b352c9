"""A whole answer from its deltas: the one place where the fields of both meet."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from plait.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput


async def gather(
    source: AsyncGenerator[CompletionDelta, None],
    *,
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    answers: int,
) -> RequestOutput:
    """Put all deltas of a request with so many answers together. Raises what ``source`` raises; closes it."""
    started = time.monotonic()
    outputs = [CompletionOutput(index) for index in range(answers)]
    whole = RequestOutput(request_id, prompt, prompt_token_ids, outputs, finished=False)
    texts: list[list[str]] = [[] for _ in outputs]
    async with aclosing(source) as deltas:
        async for delta in deltas:
            if whole.metrics.first_token is None and delta.token_ids:
                whole.metrics.first_token = time.monotonic() - started
            texts[delta.index].append(delta.text)
            _add(whole, delta)
    for completion, pieces in zip(outputs, texts, strict=True):
        completion.text = "".join(pieces)
    whole.finished = True
    whole.metrics.finished = time.monotonic() - started
    return whole


def _add(whole: RequestOutput, delta: CompletionDelta) -> None:
    completion = whole.outputs[delta.index]
    completion.token_ids += delta.token_ids
    completion.starts += delta.starts
    if delta.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + delta.logprobs
        chosen = (entry[token].logprob for token, entry in zip(delta.token_ids, delta.logprobs, strict=True))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(chosen)
    if delta.finish_reason is not None:
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
    if delta.kv_transfer_params is not None:
        whole.kv_transfer_params = delta.kv_transfer_params
    if delta.prompt_logprobs is not None:
        whole.prompt_logprobs = delta.prompt_logprobs
    whole.num_cached_tokens = max(whole.num_cached_tokens, delta.num_cached_tokens)
