"""Answering a request: what chat and text completions have in common.

One ``Answer`` is one HTTP request. It holds the prompts, asks the engine, and leaves the shapes of
choices to its subclasses. The choice of child ``c`` of prompt ``p`` has index ``p * n + c``.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from plait.core.sampling_params import SamplingParams
from plait.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.server import sse
from plait.server.desk import Order
from plait.server.errors import as_api_error
from plait.server.metrics import Stopwatch
from plait.server.prompts import Prompt
from plait.server.protocol import Request
from plait.server.service import Service

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Token counts as the OpenAI API reports them; of reasoning only where it is told apart."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


class Answer(ABC):
    """One HTTP request on its way to being answered."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, service: Service, body: Request, prompts: list[Prompt], params: SamplingParams):
        self.service = service
        self.body = body
        self.prompts = prompts
        self.params = params
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.head = {
            "id": self.id,
            "object": self.object,
            "created": int(time.time()),
            "model": service.model,
        }
        self.clock = Stopwatch(service.metrics)

    @abstractmethod
    def choice(self, prompt: int, output: CompletionOutput, request: RequestOutput) -> dict[str, Any]:
        """One entry of ``choices`` of a whole answer."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The entry of ``choices`` that opens an answer in a stream, if there is one."""

    @abstractmethod
    def delta_choice(self, prompt: int, delta: CompletionDelta) -> dict[str, Any] | None:
        """The entry of ``choices`` for what was added; None if there is nothing to show yet."""

    async def respond(self, http: HTTPRequest) -> Response:
        """The HTTP response; headers of a stream are sent once its first token is known to come.

        Raises:
            RequestRefused, EngineDeadError: from the engine, while an error status can still be sent.
        """
        try:
            if self.body.stream:
                return await self._stream(http)
            return await sse.unless_gone(http.receive, self._whole())
        except sse.ClientGone:
            return sse.gone()

    def _order(self, prompt: int) -> Order:
        return Order(
            self.prompts[prompt],
            self.params,
            self.id if len(self.prompts) == 1 else f"{self.id}-{prompt}",
            self.body.priority,
            self.body.cache_salt,
            self.body.timeout,
            self.body.kv_transfer_params,
        )

    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far, None where it is not told apart."""
        return None

    # -- whole answers -------------------------------------------------------------------------------

    async def _whole(self) -> Response:
        desk = self.service.desk
        requests = await sse.together([desk.generate(self._order(p)) for p in range(len(self.prompts))])
        self.clock.first_token(requests[0].metrics.first_token)
        self.clock.end()
        return Response(encode(self.whole_body(requests)), media_type="application/json")

    def whole_body(self, requests: list[RequestOutput]) -> dict[str, Any]:
        """The JSON body of a whole answer."""
        choices = [
            self.choice(p, output, request)
            for p, request in enumerate(requests)
            for output in sorted(request.outputs, key=lambda o: o.index)
        ]
        totals = usage(
            sum(len(p.token_ids) for p in self.prompts),
            sum(self.counted(len(o.token_ids)) for r in requests for o in r.outputs),
            sum(r.num_cached_tokens for r in requests),
            self.reasoning_tokens(),
        )
        body = self.head | {"choices": choices, "usage": totals}
        if requests[0].kv_transfer_params is not None:
            body["kv_transfer_params"] = requests[0].kv_transfer_params
        return body

    def counted(self, tokens: int) -> int:
        """Tokens of the answer that the client asked for, of ``tokens`` generated."""
        return tokens

    # -- streams -------------------------------------------------------------------------------------

    async def _stream(self, http: HTTPRequest) -> Response:
        desk = self.service.desk
        deltas = sse.merged([desk.stream(self._order(p)) for p in range(len(self.prompts))])
        # The first delta is awaited before headers go out, so that a refusal can still be a 400.
        first = await sse.unless_gone(http.receive, anext(deltas))
        return sse.EventStream(self._events(first, deltas), deltas)

    async def _events(
        self, first: tuple[int, CompletionDelta], deltas: AsyncGenerator[tuple[int, CompletionDelta], None]
    ) -> AsyncGenerator[bytes, None]:
        chunks = _Chunks(self)
        try:
            yield chunks.opening()
            if data := chunks.of(*first):
                yield data
            async for prompt, delta in deltas:
                if data := chunks.of(prompt, delta):
                    yield data
            self.clock.end()
            yield chunks.closing()
        except Exception as error:
            # Headers are out; what is left is an event that says so, and no [DONE].
            yield sse.event(as_api_error(error).body())


class _Chunks:
    """The events of one stream. All but the choice itself is encoded once."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._head = encode(answer.head | {"object": answer.chunk_object})[:-1] + b',"choices":['
        options = answer.body.stream_options
        self._usage = options is not None and options.include_usage
        self._running_usage = options is not None and options.continuous_usage_stats
        self._prompt_tokens = sum(len(p.token_ids) for p in answer.prompts)
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def _chunk(self, choices: bytes, totals: bytes | None = None) -> bytes:
        if totals is None and self._usage:
            totals = b"null"
        tail = b"]}" if totals is None else b'],"usage":' + totals + b"}"
        return sse.event(self._head + choices + tail)

    def _totals(self) -> bytes:
        cached, reasoning = sum(self._cached.values()), self._answer.reasoning_tokens()
        return encode(usage(self._prompt_tokens, self._completion_tokens, cached, reasoning))

    def opening(self) -> bytes:
        answer = self._answer
        count = len(answer.prompts) * answer.params.n
        choices = [c for i in range(count) if (c := answer.opening(i)) is not None]
        return b"".join(self._chunk(encode(c)) for c in choices)

    def of(self, prompt: int, delta: CompletionDelta) -> bytes | None:
        """The event for a delta, None if it has nothing to show."""
        answer = self._answer
        self._cached[prompt] = max(delta.num_cached_tokens, self._cached.get(prompt, 0))
        count = len(delta.token_ids)
        if count:
            self._completion_tokens += count
            answer.clock.tokens((prompt, delta.index), count)
        choice = answer.delta_choice(prompt, delta)
        if choice is None:
            return None
        return self._chunk(encode(choice), self._totals() if self._running_usage else None)

    def closing(self) -> bytes:
        return (self._chunk(b"", self._totals()) if self._usage else b"") + sse.DONE
