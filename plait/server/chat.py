"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from plait.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.server.answers import Answer
from plait.server.prompts import Turn
from plait.server.protocol import ChatRequest
from plait.server.replies import Reply
from plait.server.service import Service
from plait.server.tools import toolbox
from plait.text.parsing import CallArguments, CallBegin, Content, Event, Reasoning


async def chat_completions(service: Service, body: ChatRequest, http: HTTPRequest) -> Response:
    """Render the conversation, and answer it."""
    service.check(body)
    params = body.sampling_params(service.defaults, logprobs=body.logprobs_asked())
    form = await body.form()
    turn = Turn(
        body.messages,
        toolbox(body.tools, body.tool_choice, body.parallel_tool_calls),
        service.thinking_kwargs(body.reasoning_effort) | body.chat_template_kwargs,
        body.add_generation_prompt,
        body.continue_final_message,
    )
    prompt = await service.render(turn)
    params = service.with_budget(params, prompt, body.thinking_token_budget)
    params = await service.with_form(params, prompt, form, turn.tools)
    return await ChatAnswer(service, body, [prompt], params).respond(http)


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    body: ChatRequest

    def __init__(self, *args: Any):
        super().__init__(*args)
        form = self.service.format
        self._id_length = form.call_id_length if form else 0
        self._tells_reasoning = form is not None and form.reasoning is not None
        self._replies: defaultdict[int, Reply] = defaultdict(lambda: Reply(self._parser(), self._id_length))

    def _parser(self) -> Any:
        make = self.prompts[0].parser
        return make() if make else None

    def reasoning_tokens(self) -> int | None:
        if not self._tells_reasoning:
            return None
        return sum(reply.reasoning_tokens for reply in self._replies.values())

    def whole_body(self, requests: list[RequestOutput]) -> dict[str, Any]:
        body = super().whole_body(requests)
        if (rows := requests[0].prompt_logprobs) is not None:
            body["prompt_logprobs"] = self.service.logprobs.prompt(rows)
        if self.body.return_token_ids:
            body["prompt_token_ids"] = self.prompts[0].token_ids
        return body

    def choice(self, prompt: int, output: CompletionOutput, request: RequestOutput) -> dict[str, Any]:
        reply = Reply.of(output, self._parser(), self._id_length)
        self._replies[output.index] = reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if self._tells_reasoning and self.body.include_reasoning:
            message |= _reasoning(reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
                for call in reply.calls
            ]
        return {"index": output.index, "message": message, **self._rest(output, reply)}

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
        reply = self._replies[delta.index]
        events = reply.take(delta)
        added = self._added(reply, events)
        if not (added or delta.finish_reason or delta.logprobs or self.body.return_token_ids):
            return None  # an incomplete character, or text held back until a stop string or tag is ruled out
        return {"index": delta.index, "delta": added, **self._rest(delta, reply)}

    def _added(self, reply: Reply, events: Iterable[Event]) -> dict[str, Any]:
        """``delta`` of a chunk."""
        added: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case Content(text):
                    added["content"] = added.get("content", "") + text
                case Reasoning(text) if self.body.include_reasoning:
                    added |= _reasoning(added.get("reasoning", "") + text)
                case CallBegin(index, name):
                    function = {"name": name, "arguments": ""}
                    call_id = reply.calls[index].id
                    calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            added["tool_calls"] = list(calls.values())
        return added

    def _rest(self, output: CompletionOutput | CompletionDelta, reply: Reply) -> dict[str, Any]:
        logprobs = None
        if self.params.logprobs is not None and output.logprobs:
            logprobs = self.service.logprobs.chat(output.token_ids, output.logprobs, self.params.logprobs)
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reply.finish_reason}
        if output.finish_reason is not None:
            rest["stop_reason"] = output.stop_reason
        if self.body.return_token_ids:
            rest["token_ids"] = list(output.token_ids)
        return rest


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Under the name that clients know, and the older one."""
    return {"reasoning": text, "reasoning_content": text}
