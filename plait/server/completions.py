"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from plait.core.sampling_params import SamplingParams
from plait.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.server.answers import Answer
from plait.server.errors import APIError
from plait.server.logprobs import Candidates
from plait.server.prompts import Prompt
from plait.server.protocol import CompletionRequest
from plait.server.service import Service


async def completions(service: Service, body: CompletionRequest, http: HTTPRequest) -> Response:
    """Continue each prompt."""
    service.check(body)
    params = _sampling_params(service, body)
    prompts = [await service.encode(p, body.add_special_tokens) for p in body.prompts()]
    for i, prompt in enumerate(prompts):
        if not prompt.token_ids:
            which = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            raise APIError(400, f"{which} is empty: it must hold at least one token", "prompt")
    if body.kv_transfer_params is not None and len(prompts) > 1:
        message = "kv_transfer_params are of one prompt: send the prompts one by one"
        raise APIError(400, message, "kv_transfer_params")
    params = await service.with_form(params, prompts[0], await body.form())
    return await CompletionAnswer(service, body, prompts, params).respond(http)


def _sampling_params(service: Service, body: CompletionRequest) -> SamplingParams:
    more: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise APIError(400, "echo with logprobs comes with whole answers only: leave out stream", "echo")
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens == 0:
        if not body.echo or body.stream:
            message = "max_tokens=0 is for echo in whole answers; otherwise it is from 1 up"
            raise APIError(400, message, "max_tokens")
        more["max_tokens"] = 1  # the engine generates at least one; it is left out of the answer
    return body.sampling_params(service.defaults, **more)


class CompletionAnswer(Answer):
    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    body: CompletionRequest

    def counted(self, tokens: int) -> int:
        return 0 if self.body.max_tokens == 0 else tokens

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.service.tokenizer()
        return tokenizer.decode(prompt.token_ids, skip_special_tokens=self.body.skip_special_tokens)

    def choice(self, prompt: int, output: CompletionOutput, request: RequestOutput) -> dict[str, Any]:
        body, asked = self.body, self.prompts[prompt]
        if body.max_tokens == 0:
            output = CompletionOutput(output.index, logprobs=[], finish_reason="length")
        text = output.text
        tokens = list(output.token_ids)
        rows: list[Candidates | None] = list(output.logprobs or [])
        if body.echo:
            text = self._echo(asked) + text
            if request.prompt_logprobs is not None:
                tokens = asked.token_ids + tokens
                rows = request.prompt_logprobs + rows
        logprobs = None
        if body.logprobs is not None:
            logprobs = self.service.logprobs.completion(tokens, rows, body.logprobs, 0)
        choice: dict[str, Any] = {
            "index": prompt * self.params.n + output.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if body.prompt_logprobs is not None and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.service.logprobs.prompt(request.prompt_logprobs)
        if body.return_token_ids:
            choice["prompt_token_ids"] = asked.token_ids
            choice["token_ids"] = list(output.token_ids)
        return choice

    def opening(self, index: int) -> dict[str, Any] | None:
        prompt = self.prompts[index // self.params.n]
        if not (self.body.echo or self.body.return_token_ids):
            return None
        text = self._echo(prompt) if self.body.echo else ""
        opening = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self.body.return_token_ids:
            opening["prompt_token_ids"] = prompt.token_ids
        return opening

    def delta_choice(self, prompt: int, delta: CompletionDelta) -> dict[str, Any] | None:
        if not (delta.text or delta.finish_reason or delta.logprobs or self.body.return_token_ids):
            return None  # an incomplete character, or text held back until a stop string is ruled out
        index = prompt * self.params.n + delta.index
        choice: dict[str, Any] = {"index": index, "text": delta.text}
        choice["logprobs"] = self._delta_logprobs(index, delta)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _delta_logprobs(self, index: int, delta: CompletionDelta) -> dict[str, Any] | None:
        if self.body.logprobs is None or not delta.logprobs:
            return None
        offset = self._offsets.get(index, 0)
        shown = self.service.logprobs.completion(delta.token_ids, delta.logprobs, self.body.logprobs, offset)
        self._offsets[index] = offset + sum(map(len, shown["tokens"]))
        return shown

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets: dict[int, int] = {}
        """characters of each answer whose log-probabilities were sent"""
