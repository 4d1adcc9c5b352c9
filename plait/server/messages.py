"""``POST /v1/messages``: answers in the shapes of the Anthropic API."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from itertools import groupby
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from plait.engine.outputs import CompletionDelta, CompletionOutput
from plait.server import sse
from plait.server.anthropic_messages import CountRequest, MessagesRequest
from plait.server.desk import Order
from plait.server.errors import APIError, as_api_error
from plait.server.metrics import Stopwatch
from plait.server.prompts import Prompt
from plait.server.replies import Reply
from plait.server.service import Service
from plait.text.parsing import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


async def count_tokens(service: Service, body: CountRequest) -> dict[str, int]:
    """Tokens of the prompt that a request would have."""
    service.check_model(body.model)
    prompt = await service.render(body.turn(_default_thinking(service)))
    return {"input_tokens": len(prompt.token_ids)}


async def create_message(service: Service, body: MessagesRequest, http: HTTPRequest) -> Response:
    """Render the conversation, and answer it."""
    service.check_model(body.model)
    params = body.sampling_params(service.defaults)
    budget = body.thinking_budget
    turn = body.turn(_default_thinking(service))
    prompt = await service.render(turn)
    params = service.with_budget(params, prompt, budget, "thinking.budget_tokens")
    params = await service.with_form(params, prompt, None, turn.tools)
    answer = MessageAnswer(service, body, prompt)
    order = Order(prompt, params, answer.id)
    try:
        if not body.stream:
            output = await sse.unless_gone(http.receive, service.desk.generate(order))
            answer.clock.first_token(output.metrics.first_token)
            answer.clock.end()
            whole = answer.whole(output.outputs[0], output.num_cached_tokens)
            return Response(encode(whole), media_type="application/json")
        deltas = service.desk.stream(order)
        # The first delta is awaited before headers go out, so that a refusal can still be a 400.
        first = await sse.unless_gone(http.receive, anext(deltas))
        return sse.EventStream(answer.events(first, deltas), deltas)
    except sse.ClientGone:
        return sse.gone()


def _default_thinking(service: Service) -> bool | None:
    """This API thinks where it is asked to, unless the server's own default says something."""
    form = service.format
    if form is None or form.reasoning is None:
        return None
    return None if "enable_thinking" in service.settings.default_chat_template_kwargs else False


class MessageAnswer:
    """One message on its way: blocks of thinking, text and calls, in the order in which they were written."""

    def __init__(self, service: Service, body: MessagesRequest, prompt: Prompt):
        self.id = f"msg_{uuid.uuid4().hex}"
        self.clock = Stopwatch(service.metrics)
        self._body = body
        self._prompt_tokens = len(prompt.token_ids)
        id_length = service.format.call_id_length if service.format else 0
        self._reply = Reply(prompt.parser() if prompt.parser else None, id_length)
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": service.model}

    def _usage(self, cached: int, output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }

    def _end(self) -> dict[str, Any]:
        reply = self._reply
        stopped = reply.finish_reason == "stop" and isinstance(reply.stop_reason, str)
        names = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if stopped else names.get(str(reply.finish_reason), "end_turn")
        return {"stop_reason": reason, "stop_sequence": reply.stop_reason if stopped else None}

    # -- whole ------------------------------------------------------------------------------

    def whole(self, output: CompletionOutput, cached: int) -> dict[str, Any]:
        """The body of a whole answer."""
        events = self._reply.take(
            CompletionDelta(
                0, output.text, tuple(output.token_ids), None, output.finish_reason, output.stop_reason,
                cached, starts=tuple(output.starts),
            )
        )  # fmt: skip
        content = list(self._blocks(events))
        usage = self._usage(cached, len(output.token_ids))
        return self._head | {"content": content, **self._end(), "usage": usage}

    def _blocks(self, events: Iterable[Event]) -> Iterable[dict[str, Any]]:
        for kind, run in groupby(events, type):
            if kind is Reasoning and self._body.shows_thinking:
                thought = "".join(e.text for e in run if isinstance(e, Reasoning))
                yield {"type": "thinking", "thinking": thought, "signature": _signature(thought)}
            elif kind is Content:
                yield {"type": "text", "text": "".join(e.text for e in run if isinstance(e, Content))}
            elif kind is CallEnd:
                for call in (self._reply.calls[e.index] for e in run if isinstance(e, CallEnd)):
                    given = json.loads(call.json)
                    yield {"type": "tool_use", "id": call.id, "name": call.name, "input": given}

    # -- stream -----------------------------------------------------------------------------

    async def events(
        self, first: CompletionDelta, deltas: AsyncGenerator[CompletionDelta, None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        blocks = _BlockStream(self._reply, self._body.shows_thinking)
        cached, count = first.num_cached_tokens, 0
        try:
            opening: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = self._head | opening | {"usage": self._usage(cached, 0)}
            yield _event("message_start", {"message": message})
            yield _event("ping", {})
            async with aclosing(_chain(first, deltas)) as every:
                async for delta in every:
                    count += len(delta.token_ids)
                    if delta.token_ids:
                        self.clock.tokens((0, 0), len(delta.token_ids))
                    if data := b"".join(blocks.of(self._reply.take(delta))):
                        yield data
            yield b"".join(blocks.close())
            self.clock.end()
            yield _event("message_delta", {"delta": self._end(), "usage": self._usage(cached, count)})
            yield _event("message_stop", {})
        except Exception as error:
            fault: APIError = as_api_error(error)
            yield b"event: error\n" + sse.event(fault.body())


async def _chain(
    first: CompletionDelta, rest: AsyncGenerator[CompletionDelta, None]
) -> AsyncGenerator[CompletionDelta, None]:
    yield first
    async with aclosing(rest) as deltas:
        async for delta in deltas:
            yield delta


class _BlockStream:
    """Events of content blocks: one is open at a time."""

    def __init__(self, reply: Reply, shows_thinking: bool):
        self._reply = reply
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None
        self._thought: list[str] = []

    def of(self, events: Iterable[Event]) -> Iterable[bytes]:
        for event in events:
            match event:
                case Reasoning(text):
                    if self._shows_thinking:
                        yield from self._switch("thinking", {"thinking": "", "signature": ""})
                        self._thought.append(text)
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case Content(text):
                    yield from self._switch("text", {"text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case CallBegin(index, name):
                    yield from self.close()
                    block = {"id": self._reply.calls[index].id, "name": name, "input": {}}
                    yield from self._switch("tool_use", block)
                case CallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnd():
                    yield from self.close()

    def _switch(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._index += 1
        content = {"type": kind} | block
        yield _event("content_block_start", {"index": self._index, "content_block": content})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def close(self) -> Iterable[bytes]:
        """End the block that is open."""
        if self._open == "thinking":
            signature = _signature("".join(self._thought))
            self._thought = []
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield _event("content_block_stop", {"index": self._index})
        self._open = None


def _signature(text: str) -> str:
    """Thinking comes back with its signature, and clients expect one; nothing is encrypted here."""
    return hashlib.sha256(text.encode()).hexdigest()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + sse.event(encode({"type": name} | data))
