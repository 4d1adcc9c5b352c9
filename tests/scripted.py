"""An engine that plays a script, and clients of the application over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx

from plait.core.sampling_params import SamplingParams
from plait.engine.outputs import (
    CompletionDelta,
    EngineDeadError,
    Logprob,
    RequestRefused,
)
from plait.engine.stats import EngineStats
from plait.models.generation import GenerationDefaults
from plait.server import ServerSettings, create_app
from plait.text.chat import ChatTemplate

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
HELLO = [{"role": "user", "content": "hello"}]


class ByteTokenizer:
    """One token per byte; the id is the byte."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    special_ids = frozenset[int]()

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    encode_chat = encode

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_texts(self, tokens: list[int]) -> list[str]:
        return [self.token_text(token) for token in tokens]

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")


class ScriptedEngine:
    """Answers every prompt with ``answer``, one byte per token, and remembers what it was asked."""

    def __init__(
        self,
        answer: str = "Hé!",
        hang_after: int | None = None,
        template: str = CHATML,
        max_model_len: int = 100,
        reason: str = "stop",
    ):
        self.reason = reason
        self.answer = answer.encode()
        self.hang_after = hang_after
        self.dead = asyncio.Event()
        self.aborted = asyncio.Event()
        self.asked: list[tuple[Any, SamplingParams, dict[str, Any]]] = []
        self.open = 0
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.chat_template: ChatTemplate | None = ChatTemplate(template)
        defaults = GenerationDefaults(eos_token_ids=(0,), temperature=0.6, top_p=0.9)
        self.info = SimpleNamespace(
            model="tiny",
            path="/models/tiny",
            family="qwen3_5",
            max_model_len=max_model_len,
            vocab_size=256,
            pid=1,
            generation_defaults=defaults,
        )

    def check_health(self) -> None:
        if self.dead.is_set():
            raise EngineDeadError("the engine process has ended (exit code -9)")

    async def stats(self) -> Any:
        self.check_health()
        return EngineStats(
            running=1, pages_total=10, pages_free=7, pages_cached=2, pages_used=1, states_cached=3,
            prompt_tokens_total=50, cached_tokens_total=20, requests_total={"stop": 4},
        )  # fmt: skip

    async def stream(
        self, prompt: Any, params: SamplingParams, **more: Any
    ) -> AsyncIterator[CompletionDelta]:
        self.asked.append((prompt, params, more))
        self.check_health()
        count, limit = len(prompt["prompt_token_ids"]), self.info.max_model_len
        if count > limit:
            raise RequestRefused(f"{count} prompt tokens, but max_model_len is {limit}")
        if bad := [t for t in prompt["prompt_token_ids"] if not 0 <= t < self.info.vocab_size]:
            raise RequestRefused(f"token id {bad[0]} is outside the vocabulary")
        self.open += 1
        try:
            for step in range(len(self.answer)):
                for child in range(params.n):
                    delta = self._delta(params, child, step)
                    if params.prompt_logprobs is not None and step == child == 0:
                        ids = prompt["prompt_token_ids"]
                        delta.prompt_logprobs = [None, *({t: Logprob(-1.0, 1)} for t in ids[1:])]
                    yield delta
                if self.hang_after == step:
                    ends = [asyncio.ensure_future(e.wait()) for e in (self.dead, self.aborted)]
                    try:
                        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for end in ends:
                            end.cancel()
                    if self.aborted.is_set():
                        yield CompletionDelta(0, "", (), None, "abort", None, 0)
                        return
                    raise EngineDeadError("the engine process has ended (exit code -9)")
        finally:
            self.open -= 1

    def _delta(self, params: SamplingParams, child: int, step: int) -> CompletionDelta:
        token = self.answer[step]
        done = step == len(self.answer) - 1
        # As a detokenizer does: the bytes of a character come out together with its last one.
        text = self.answer[: step + 1].decode("utf-8", "ignore")[
            len(self.answer[:step].decode("utf-8", "ignore")) :
        ]
        row = {token: Logprob(-0.5, 1), 65: Logprob(-2.0, 2), 66: Logprob(float("-inf"), 3)}
        return CompletionDelta(
            child,
            text,
            (token,),
            None if params.logprobs is None else [row],
            self.reason if done else None,
            None,
            4,
            queued=0.25,
            starts=(len(self.answer[:step].decode("utf-8", "ignore")),),
        )

    def abort(self, request_id: str) -> None:
        self.aborted.set()


def serve(
    use: Callable[[httpx.AsyncClient, ScriptedEngine], Awaitable[Any]],
    engine: Callable[[], ScriptedEngine] = ScriptedEngine,
    settings: ServerSettings | None = None,
) -> Any:
    """Run ``use`` with a client of an application over a scripted engine."""

    async def run() -> Any:
        scripted = engine()
        app = create_app(scripted, settings)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
            return await asyncio.wait_for(use(client, scripted), timeout=10)

    return asyncio.run(run())


def post(path: str, body: Any, **more: Any) -> httpx.Response:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> httpx.Response:
        # json.dumps writes ASCII, and so can send what is no valid Unicode.
        headers = {"content-type": "application/json"}
        return await client.post(path, content=json.dumps(body), headers=headers)

    return serve(use, **more)


def chat(**fields: Any) -> httpx.Response:
    return post("/v1/chat/completions", {"messages": HELLO} | fields)


def completion(**fields: Any) -> httpx.Response:
    return post("/v1/completions", {"prompt": "ab"} | fields)


def asked_of_engine(
    path: str, body: dict[str, Any], **more: Any
) -> tuple[Any, SamplingParams, dict[str, Any]]:
    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> Any:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return engine.asked[0]

    return serve(use, **more)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
