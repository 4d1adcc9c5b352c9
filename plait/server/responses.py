"""``POST /v1/responses``: answers as items, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from plait.core.sampling_params import SamplingParams
from plait.engine.outputs import CompletionDelta
from plait.server import sse
from plait.server.desk import Order
from plait.server.errors import as_api_error
from plait.server.metrics import Stopwatch
from plait.server.prompts import Prompt, Turn
from plait.server.replies import Reply
from plait.server.responses_request import ResponsesRequest, encrypted
from plait.server.service import Service
from plait.text.parsing import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
Fields = dict[str, Any]


async def create_response(service: Service, body: ResponsesRequest, http: HTTPRequest) -> Response:
    """Render the conversation, and answer it."""
    service.check_model(body.model)
    service.check_priority(body.priority)
    effort = body.effort()
    params = body.sampling_params(service.defaults)
    form = await body.form()
    kwargs = service.thinking_kwargs(effort) | body.chat_template_kwargs
    tools = body.toolbox()
    prompt = await service.render(Turn(body.messages(), tools, kwargs, param="input"))
    params = service.with_budget(params, prompt, body.thinking_token_budget)
    params = await service.with_form(params, prompt, form, tools)
    answer = ResponseAnswer(service, body, prompt, params)
    order = Order(prompt, params, answer.id, body.priority, body.cache_salt, body.timeout)
    deltas = service.desk.stream(order)
    try:
        if not body.stream:
            whole = await sse.unless_gone(http.receive, answer.whole(deltas))
            return Response(encode(whole), media_type="application/json")
        # The first delta is awaited before headers go out, so that a refusal can still be a 400.
        first = await sse.unless_gone(http.receive, anext(deltas))
        return sse.EventStream(answer.events(first, deltas), deltas)
    except sse.ClientGone:
        return sse.gone()


class ResponseAnswer:
    """One response on its way. A whole one is made of the same events as a stream."""

    def __init__(self, service: Service, body: ResponsesRequest, prompt: Prompt, params: SamplingParams):
        self.id = f"resp_{uuid.uuid4().hex}"
        self._service = service
        self._body = body
        self._params = params
        self._clock = Stopwatch(service.metrics)
        self._created = int(time.time())
        self._input_tokens = len(prompt.token_ids)
        self._output_tokens = self._cached = 0
        id_length = service.format.call_id_length if service.format else 0
        self._reply = Reply(prompt.parser() if prompt.parser else None, id_length)
        self._items = _Items(self._reply, body.wants_encrypted, body.wants_summary)
        self._sequence = 0

    async def whole(self, deltas: AsyncGenerator[CompletionDelta, None]) -> Fields:
        """The body of a whole answer."""
        async with aclosing(deltas) as every:
            async for delta in every:
                for _ in self._take(delta):
                    pass
        for _ in self._items.close():
            pass
        self._clock.end()
        return self._response(self._status())

    def _take(self, delta: CompletionDelta) -> Iterable[Fields]:
        self._output_tokens += len(delta.token_ids)
        self._cached = max(self._cached, delta.num_cached_tokens)
        if delta.token_ids:
            self._clock.tokens((0, 0), len(delta.token_ids))
        return self._items.of(self._reply.take(delta))

    async def events(
        self, first: CompletionDelta, deltas: AsyncGenerator[CompletionDelta, None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        try:
            for name in ("created", "in_progress"):
                yield self._event({"type": f"response.{name}", "response": self._response("in_progress")})
            yield b"".join(map(self._event, self._take(first)))
            async with aclosing(deltas) as every:
                async for delta in every:
                    if data := b"".join(map(self._event, self._take(delta))):
                        yield data
            yield b"".join(map(self._event, self._items.close()))
            self._clock.end()
            status = self._status()
            yield self._event({"type": f"response.{status}", "response": self._response(status)})
        except Exception as error:
            fault = as_api_error(error)
            failed = self._response("failed") | {"error": {"code": "server_error", "message": fault.message}}
            yield self._event({"type": "response.failed", "response": failed})

    def _event(self, event: Fields) -> bytes:
        event = event | {"sequence_number": self._sequence}
        self._sequence += 1
        name: str = event["type"]
        return b"event: " + name.encode() + b"\n" + sse.event(encode(event))

    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason in ("length", "abort") else "completed"

    def _response(self, status: str) -> Fields:
        body, done = self._body, status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._service.model,
            "output": self._items.done if done else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "store": False,
            "background": False,
            "temperature": self._params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, "description": None, "parameters": None} | t for t in body.tools],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> Fields:
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reply.reasoning_tokens},
            "total_tokens": self._input_tokens + self._output_tokens,
        }


@dataclass(frozen=True, slots=True)
class _Text:
    """How an item's text is told: where it stands, and what its events are called."""

    item: str
    prefix: str
    part: str
    place: str
    """of the part in the item"""
    index: str
    part_event: str
    text_event: str
    more: tuple[str, ...] = ()
    """lists beside the text, empty"""

    def made(self, text: str) -> Fields:
        return {"type": self.part, "text": text} | {name: [] for name in self.more}


_CONTENT = ("content", "content_index", "response.content_part")
_MESSAGE = _Text(
    "message", "msg", "output_text", *_CONTENT, "response.output_text", ("annotations", "logprobs")
)
_REASONING = _Text("reasoning", "rs", "reasoning_text", *_CONTENT, "response.reasoning_text")
_SUMMARY = _Text(
    "reasoning", "rs", "summary_text", "summary", "summary_index", "response.reasoning_summary_part",
    "response.reasoning_summary_text",
)  # fmt: skip
"""Clients made for hosted models show summaries only; the whole of the reasoning is the best of them."""


class _Items:
    """The items of an output, one open at a time, and the events that tell of them."""

    def __init__(self, reply: Reply, wants_encrypted: bool, wants_summary: bool):
        self._reasoning = _SUMMARY if wants_summary else _REASONING
        self.done: list[Fields] = []
        self._reply = reply
        self._encrypts = wants_encrypted
        self._item: Fields | None = None
        self._text: list[str] = []

    def of(self, events: Iterable[Event]) -> Iterable[Fields]:
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._grow(self._reasoning, text)
                case Content(text):
                    yield from self._grow(_MESSAGE, text)
                case CallBegin(index, name):
                    yield from self.close()
                    call = self._reply.calls[index]
                    more = {"call_id": call.id, "name": name, "arguments": ""}
                    yield from self._open("function_call", "fc", more)
                case CallArguments(_, text):
                    self._text.append(text)
                    yield self._about("response.function_call_arguments.delta", delta=text)
                case CallEnd():
                    yield from self.close()

    def _about(self, kind: str, **more: Any) -> Fields:
        assert self._item is not None
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.done), **more}

    def _open(self, kind: str, prefix: str, more: Fields) -> Iterable[Fields]:
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more}
        self._text = []
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": self._item}

    def _grow(self, form: _Text, text: str) -> Iterable[Fields]:
        if self._item is None or self._item["type"] != form.item:
            yield from self.close()
            more: Fields = {"role": "assistant", "content": []}
            if form.item == "reasoning":
                more = {"summary": [], "content": []}
            yield from self._open(form.item, form.prefix, more)
            yield self._about(form.part_event + ".added", **{form.index: 0}, part=form.made(""))
        self._text.append(text)
        yield self._about(form.text_event + ".delta", **{form.index: 0}, delta=text, **_logprobs(form))

    def close(self) -> Iterable[Fields]:
        """End the item that is open."""
        item = self._item
        if item is None:
            return
        text, kind = "".join(self._text), item["type"]
        status = "completed"
        if kind == "function_call":
            if not self._reply.calls[-1].ended:
                status = "incomplete"
            yield self._about("response.function_call_arguments.done", arguments=text, name=item["name"])
            whole = item | {"arguments": text}
        else:
            form = _MESSAGE if kind == "message" else self._reasoning
            yield self._about(form.text_event + ".done", **{form.index: 0}, text=text, **_logprobs(form))
            yield self._about(form.part_event + ".done", **{form.index: 0}, part=form.made(text))
            whole = item | {form.place: [form.made(text)]}
            if kind == "reasoning" and self._encrypts:
                whole["encrypted_content"] = encrypted(text)
            if self._reply.finish_reason == "length":
                status = "incomplete"
        whole["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": whole}
        self.done.append(whole)
        self._item = None


def _logprobs(form: _Text) -> Fields:
    return {"logprobs": []} if form is _MESSAGE else {}
