"""Any server that speaks the OpenAI API, asked through streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from plait.bench.record import Record
from plait.bench.target import Clock, Message, TargetError
from plait.bench.workload import Content
from plait.bench.writers import length_of

if TYPE_CHECKING:
    import httpx

    from plait.text.tokenizer import Tokenizer

ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}

_LADDER = (("stream_options", "ignore_eos"), ("ignore_eos",), ("stream_options",), ())
"""Fields beyond the common ones, from what is wanted down to what every server takes."""


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise TargetError("plait bench over HTTP needs more packages: pip install 'plait[bench]'") from error
    return httpx


class HTTPTarget:
    """One model behind an OpenAI-compatible base URL.

    Args:
        base_url: with or without ``/v1``.
        model: as the server calls it; None: the first it lists.
        endpoint: "completions" (text or token ids) or "chat" (text).
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which a request has failed.
        tokenizer: counts prompt tokens where the server reports none.
        extra: further fields of every request body.

    Attributes:
        notes: what the server does not take or report, in words.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        endpoint: str = "completions",
        api_key: str | None = None,
        timeout: float = 600.0,
        tokenizer: Tokenizer | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint {endpoint!r}: choose one of {', '.join(ENDPOINTS)}")
        base_url = base_url.rstrip("/")
        self.base_url = base_url if base_url.endswith("/v1") else base_url + "/v1"
        self.model = model or ""
        self.endpoint = endpoint
        self.notes: list[str] = []
        self._tokenizer = tokenizer
        self._extra = extra or {}
        self._fields: tuple[str, ...] = _LADDER[0]
        library = _httpx()
        self._http: httpx.AsyncClient = library.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=library.Timeout(timeout, connect=10.0),
            limits=library.Limits(max_connections=None, max_keepalive_connections=None),
        )

    @property
    def name(self) -> str:
        return self.base_url

    async def connect(self) -> None:
        """Find the model and which fields the server takes, by one short request.

        Raises:
            TargetError: it cannot be reached, or refuses the plainest request.
        """
        try:
            if not self.model:
                self.model = await self._first_model()
            for fields in _LADDER:
                self._fields = fields
                refusal = await self._probe()
                if refusal is None:
                    break
            else:
                raise TargetError(f"{self.base_url} refuses a plain request for {self.model!r}: {refusal}")
        except _httpx().HTTPError as error:
            raise TargetError(
                f"{self.base_url} cannot be reached ({_reason(error)}); is the server up, and the URL right?"
            ) from error
        for name in _LADDER[0]:
            if name not in self._fields:
                self.notes.append(f"{self.base_url} does not take {name}")

    async def _first_model(self) -> str:
        response = await self._http.get(self.base_url + "/models")
        try:
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError, _httpx().HTTPStatusError) as error:
            raise TargetError(f"{self.base_url}/models lists no model; name one with --model") from error

    async def _probe(self) -> str | None:
        """Why the server refuses the present fields; None if it takes them."""
        body = self._body([Message("user", "Hello")], 1)
        async with self._http.stream("POST", self.base_url + ENDPOINTS[self.endpoint], json=body) as response:
            text = (await response.aread()).decode(errors="replace")
        return None if response.status_code == 200 else f"{response.status_code} {_message(text)}"

    def _body(self, history: Sequence[Message], output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": 0, **self._extra}
        body["max_tokens"] = output_len
        if "stream_options" in self._fields:
            body["stream_options"] = {"include_usage": True}
        if "ignore_eos" in self._fields:
            body["ignore_eos"] = True
        if self.endpoint == "chat":
            body["messages"] = [{"role": m.role, "content": m.content} for m in history]
        else:
            body["prompt"] = _join(history)
        return body

    async def ask(
        self, history: Sequence[Message], output_len: int, record: Record, clock: Clock
    ) -> Content | None:
        body = self._body(history, output_len)
        answer: list[str] = []
        usage: dict[str, Any] | None = None
        record.sent = clock()
        try:
            async for event in self._events(body):
                if event.get("error"):
                    raise _ServerError(_message(json.dumps(event)))
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    record.finish_reason = choice.get("finish_reason") or record.finish_reason
                    piece = _piece(choice)
                    if piece:
                        record.chunks.append(clock())
                        answer.append(piece)
            if record.finish_reason is None:
                record.error = "the stream ended without a finish reason"
        except (_httpx().HTTPError, _ServerError, ValueError) as error:
            record.error = _reason(error)
        record.ended = clock()
        self._count(record, usage, history)
        return "".join(answer) if record.ok else None

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event up to [DONE]."""
        url = self.base_url + ENDPOINTS[self.endpoint]
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _ServerError(f"{response.status_code} {_message(text)}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                yield json.loads(data)

    def _count(self, record: Record, usage: dict[str, Any] | None, history: Sequence[Message]) -> None:
        if usage is not None:
            record.prompt_tokens = usage.get("prompt_tokens") or 0
            record.output_tokens = usage.get("completion_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens")
            return
        record.counted_by = "chunks"
        record.output_tokens = len(record.chunks)
        record.prompt_tokens = sum(length_of(m.content, self._tokenizer) for m in history)

    async def prepare(self) -> None:
        return None  # no common way to empty another server's cache: runs differ in their prompts instead

    async def close(self) -> None:
        await self._http.aclose()


class _ServerError(Exception):
    """The server answered with an error."""


def _join(history: Sequence[Message]) -> str | list[int]:
    """A raw prompt: messages one after the other. An answer follows its prompt exactly as it came, so that
    the server finds again what it has cached."""
    if isinstance(history[0].content, tuple):
        return [token for message in history for token in message.content if isinstance(token, int)]
    text = ""
    for message in history:
        text += " " if text and message.role != "assistant" else ""
        text += str(message.content)
    return text


def _piece(choice: dict[str, Any]) -> str:
    """What a choice adds to the answer, the reasoning included."""
    delta = choice.get("delta") or choice
    parts = (delta.get(name) for name in ("reasoning_content", "reasoning", "content", "text"))
    return "".join(part for part in parts if isinstance(part, str))


def _message(text: str) -> str:
    """The message inside an error body, in one line."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300]


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, _ServerError) else f"{type(error).__name__}: {text}".removesuffix(": ")
