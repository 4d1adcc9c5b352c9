"""Many streams at once: nothing is lost, little is spent, and clients that stop reading hold no memory."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer, alive, until
from thinking import WEATHER, thinking_model
from wire import LONG, Stopped, events, posts

STREAMS, TOKENS = 200, 40
MOST_CPU_MS = 0.5
"""that the server's own process may take for a streamed token"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    server = LiveServer(
        model, "--served-model-name", "tiny", "--max-num-seqs", str(STREAMS), "--memory-limit", "1.5GiB"
    )
    yield server
    assert server.stop() == 0
    assert not alive(server.engine_pid)


def cpu_ms(pid: int) -> float:
    """Processor time that a process has taken, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


Grow = Callable[[list[dict[str, Any]]], Any]


def chat_bodies(tokens: int) -> list[dict[str, Any]]:
    more = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "return_token_ids": True}
    more |= {"thinking_token_budget": tokens // 2, "tools": [WEATHER]}
    questions = [[{"role": "user", "content": f"Question {i}: why?"}] for i in range(STREAMS)]
    return [{"messages": q, "seed": i, **more} for i, q in enumerate(questions)]


def completion_bodies(tokens: int) -> list[dict[str, Any]]:
    more = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "return_token_ids": True}
    return [{"prompt": f"{i} is a number, and", "seed": i, **more} for i in range(STREAMS)]


def grown_chat(chunks: list[dict[str, Any]]) -> Any:
    choices = [c["choices"][0] for c in chunks]
    texts = [
        "".join(c["delta"].get(name) or "" for c in choices) or None for name in ("reasoning", "content")
    ]
    return texts, [t for c in choices for t in c.get("token_ids", [])], choices[-1]["finish_reason"]


def whole_chat(answer: dict[str, Any]) -> Any:
    [choice] = answer["choices"]
    message = choice["message"]
    texts = [message["reasoning"] or None, message["content"] or None]
    return texts, choice["token_ids"], choice["finish_reason"]


def grown_completion(chunks: list[dict[str, Any]]) -> Any:
    choices = [c["choices"][0] for c in chunks]
    ids = [t for c in choices for t in c.get("token_ids", [])]
    return "".join(c["text"] for c in choices), ids, choices[-1]["finish_reason"]


def whole_completion(answer: dict[str, Any]) -> Any:
    [choice] = answer["choices"]
    return choice["text"], choice["token_ids"], choice["finish_reason"]


@pytest.mark.parametrize(
    ("path", "bodies", "grown", "whole"),
    [
        ("/v1/chat/completions", chat_bodies, grown_chat, whole_chat),
        pytest.param(
            "/v1/completions", completion_bodies, grown_completion, whole_completion, marks=pytest.mark.slow
        ),
    ],
    ids=["chat", "completions"],
)
def test_200_streams_at_once(server: LiveServer, path: str, bodies: Any, grown: Any, whole: Any) -> None:
    asked = bodies(TOKENS)
    expected = [json.loads(b) for b in asyncio.run(posts(server.url, path, asked))]
    before = cpu_ms(server.process.pid)
    streams = asyncio.run(posts(server.url, path, [body | {"stream": True} for body in asked]))
    spent = cpu_ms(server.process.pid) - before
    tokens = 0
    for answer, stream in zip(expected, streams, strict=True):
        assert stream.endswith(b"data: [DONE]\n\n")
        chunks = events(stream)
        assert len(chunks) > 0.7 * TOKENS  # nearly each token by itself: bytes of one character come together
        got = grown(chunks)
        assert got == whole(answer)
        tokens += len(got[1])
    assert tokens == STREAMS * TOKENS
    print(f"\n{path}: {spent / tokens:.3f} ms of processor time for a token of {STREAMS} streams")
    assert spent / tokens < MOST_CPU_MS


@pytest.mark.parametrize(
    "prompts", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one prompt", "two prompts"]
)
def test_clients_that_stop_reading_hold_little_memory(server: LiveServer, prompts: int) -> None:
    [question] = completion_bodies(10)[:1]
    [asked] = asyncio.run(posts(server.url, "/v1/completions", [question]))
    started, before = server.metric("vllm:generation_tokens_total"), resident(server.process.pid)
    clients = [Stopped(server.url, LONG | {"prompt": [LONG["prompt"]] * prompts}) for _ in range(2)]
    try:
        assert until(lambda: server.metric("vllm:num_requests_running") == 2 * prompts, 60)
        [again] = asyncio.run(posts(server.url, "/v1/completions", [question]))
        assert choices(again) == choices(asked)
        # They end although nobody has read a byte or hung up.
        assert until(lambda: server.metric("vllm:num_requests_running") == 0, 120)
        assert server.metric("vllm:generation_tokens_total") - started < 2 * prompts * 4000
        assert resident(server.process.pid) - before < 60e6
        status, body = clients[0].read()
    finally:
        for client in clients:
            client.close()
    *chunks, last = events(body)
    assert status == 200
    assert last["error"]["code"] == "client_too_slow"
    if prompts == 1:  # what came is the beginning of the answer
        got = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])]
        assert len(got) > 1024
        more = {"stream": False, "max_tokens": len(got), "logprobs": None}
        [whole] = asyncio.run(posts(server.url, "/v1/completions", [LONG | more]))
        assert got == choices(whole)[0]["token_ids"]


def choices(body: bytes) -> Any:
    return json.loads(body)["choices"]
