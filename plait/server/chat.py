"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from plait.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.server.answers import Answer
from plait.server.protocol import ChatRequest
from plait.server.service import Service


async def chat_completions(service: Service, body: ChatRequest, http: HTTPRequest) -> Response:
    """Render the conversation, and answer it."""
    service.check(body)
    params = body.sampling_params(service.defaults, logprobs=body.logprobs_asked())
    prompt = await service.render(body)
    return await ChatAnswer(service, body, [prompt], params).respond(http)


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_body(self, requests: list[RequestOutput]) -> dict[str, Any]:
        body = super().whole_body(requests)
        if (rows := requests[0].prompt_logprobs) is not None:
            body["prompt_logprobs"] = self.service.logprobs.prompt(rows)
        if self.body.return_token_ids:
            body["prompt_token_ids"] = self.prompts[0].token_ids
        return body

    def choice(self, prompt: int, output: CompletionOutput, request: RequestOutput) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            **self._rest(output),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        opening = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.body.return_token_ids:
            opening["prompt_token_ids"] = self.prompts[0].token_ids
        return opening

    def delta_choice(self, prompt: int, delta: CompletionDelta) -> dict[str, Any] | None:
        if not (delta.text or delta.finish_reason or delta.logprobs or self.body.return_token_ids):
            return None  # an incomplete character, or text held back until a stop string is ruled out
        added = {"content": delta.text} if delta.text or not delta.finish_reason else {}
        return {"index": delta.index, "delta": added, **self._rest(delta)}

    def _rest(self, output: CompletionOutput | CompletionDelta) -> dict[str, Any]:
        logprobs = None
        if self.params.logprobs is not None and output.logprobs:
            logprobs = self.service.logprobs.chat(output.token_ids, output.logprobs, self.params.logprobs)
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": output.finish_reason}
        if output.finish_reason is not None:
            rest["stop_reason"] = output.stop_reason
        if self.body.return_token_ids:
            rest["token_ids"] = list(output.token_ids)
        return rest
