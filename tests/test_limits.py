"""What bounds a request: how many wait, how long they take, how large they are; how often streams speak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, chat, completion, events, post, serve

from plait.server import ServerSettings
from plait.server.limits import LimitBody

BODY = {"prompt": "ab"}


def hanging() -> ScriptedEngine:
    return ScriptedEngine(hang_after=0)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Slow(ScriptedEngine):
    """Gives no first token until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def stream(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        self.open += 1
        await self.go.wait()
        self.open -= 1
        async for delta in super().stream(*args, **more):
            yield delta


@pytest.mark.parametrize("stream", [True, False])
def test_one_more_than_may_wait_is_told_when_to_come_back(stream: bool) -> None:
    async def use(client: httpx.AsyncClient, engine: Slow) -> None:
        body = BODY | {"stream": stream}
        waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: engine.open == 2)
        for path, more in (
            ("/v1/completions", body),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
        ):
            refused = await client.post(path, json=more)
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "too_many_waiting"
            assert "--max-waiting" in refused.json()["error"]["message"]
        engine.go.set()
        assert [(await w).status_code for w in waiting] == [200, 200]
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    serve(use, Slow, ServerSettings(max_waiting=2))  # type: ignore[arg-type]


def test_one_that_has_its_first_token_waits_no_more() -> None:
    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        first = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: engine.open == 1)
        await until(lambda: client.app.state.service.desk.waiting == 0)  # type: ignore[attr-defined]
        second = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: engine.open == 2)
        engine.aborted.set()
        assert (await first).status_code == (await second).status_code == 200

    async def with_app(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        client.app = client._transport.app  # type: ignore[attr-defined]
        await use(client, engine)

    serve(with_app, hanging, ServerSettings(max_waiting=1))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_ends_with_what_there_is_at_its_deadline(path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else dict(BODY)
    body |= {"timeout": 0.05}
    [choice] = post(path, body, engine=hanging).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == "H"
    last = events(post(path, body | {"stream": True}, engine=hanging))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "deadline")


def test_a_deadline_before_the_first_token_is_an_error() -> None:
    class Never(ScriptedEngine):
        async def stream(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
            await self.aborted.wait()
            async for delta in ScriptedEngine("", hang_after=None).stream(*args, **more):
                yield delta
            from plait.engine.outputs import CompletionDelta

            yield CompletionDelta(0, "", (), None, "abort", None, 0)

    for stream in (True, False):
        response = post("/v1/completions", BODY | {"timeout": 0.02, "stream": stream}, engine=Never)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"


def test_a_timeout_is_a_positive_number() -> None:
    for timeout in (0, -1, "soon", 1e9):
        response = completion(timeout=timeout)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_before_it_is_held(declared: bool) -> None:
    """The answer goes out first; then what still comes is read and dropped, or a reset would overtake it."""
    most, pieces = 20_000, 1000
    asked, answers, held = 0, [], []

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": asked < pieces}

    async def send(message: dict[str, Any]) -> None:
        answers.append((asked, message))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            held.append(await receive())

    headers = [(b"content-length", b"1000000")] if declared else []
    scope = {"type": "http", "headers": headers}
    asyncio.run(LimitBody(app, most)(scope, receive, send))  # type: ignore[arg-type]
    (first, start), (second, body), (last, end) = answers
    assert first == second == (0 if declared else 21)
    assert len(held) == (0 if declared else 20)
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]
    assert "20000 bytes" in json.loads(body["body"])["error"]["message"]
    assert (last, end["body"], end["more_body"]) == (pieces, b"", False)


def test_a_long_prompt_is_refused_before_it_is_tokenized() -> None:
    calls = []

    def engine() -> ScriptedEngine:
        made = ScriptedEngine()
        assert made.tokenizer is not None
        encode = made.tokenizer.encode
        made.tokenizer.encode = lambda *a, **k: calls.append(a) or encode(*a, **k)  # type: ignore
        return made

    for body in ({"prompt": "x" * 10**6}, {"prompt": [5] * 51}):
        response = post("/v1/completions", body, engine=engine, settings=ServerSettings(max_prompt_tokens=50))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    message = {"messages": [{"role": "user", "content": "x" * 10**6}]}
    assert post("/v1/chat/completions", message, engine=engine).status_code == 400
    assert calls == []


@pytest.mark.parametrize("interval", [1, 2, 3, 100])
def test_streams_speak_as_often_as_they_are_told(interval: int) -> None:
    def engine() -> ScriptedEngine:
        return ScriptedEngine("abcdefghij")

    body = BODY | {"stream": True, "logprobs": 1, "n": 2}
    settings = ServerSettings(stream_interval=interval)
    choices = [
        c["choices"][0] for c in events(post("/v1/completions", body, engine=engine, settings=settings))
    ]
    for index in (0, 1):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(c["text"] for c in mine) == "abcdefghij"
        assert [t for c in mine for t in c["logprobs"]["tokens"]] == list("abcdefghij")
        assert len(mine[0]["text"]) == 1  # the first token does not wait
        assert len(mine) == 1 + -(-9 // interval)
        assert mine[-1]["finish_reason"] == "stop"


def test_beams_are_refused_clearly() -> None:
    for field in ({"best_of": 2}, {"use_beam_search": True}):
        error = completion(**field).json()["error"]
        assert error["param"] == next(iter(field))
        assert "not served" in error["message"]
    assert completion(best_of=1).status_code == 200


def test_a_thinking_budget_needs_a_model_that_thinks() -> None:
    response = chat(thinking_token_budget=5)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_token_budget"
    assert "--reasoning-parser" in response.json()["error"]["message"]


def test_settings_are_checked() -> None:
    for name in ("max_waiting", "stream_interval", "max_body_bytes", "max_prompt_tokens", "max_connections"):
        with pytest.raises(ValueError, match=f"{name}=0: it must be from 1 up"):
            ServerSettings(**{name: 0})
