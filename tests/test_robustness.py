"""Clients that are malformed, slow, idle or large, against `plait serve` as it runs: others are served."""

from __future__ import annotations

import asyncio
import collections
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import httpx
import pytest
from live import LiveServer, alive, until
from malformed import JSON, Malformed, Request
from thinking import thinking_model
from wire import LONG, Stopped

TIMEOUT, CONNECTIONS = 1.5, 300
QUESTION = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    limits = ("--client-timeout", str(TIMEOUT), "--max-connections", str(CONNECTIONS))
    server = LiveServer(model, "--served-model-name", "tiny", "--max-model-len", "4000", *limits)
    yield server
    assert server.stop() == 0
    assert not alive(server.engine_pid)
    said = "\n".join(server.lines)
    assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def answer(server: LiveServer) -> str:
    """The answer to ``QUESTION`` before anything has gone wrong."""
    response = httpx.post(server.url + "/v1/completions", json=QUESTION)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def address(server: LiveServer) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


def raw(server: LiveServer, sent: bytes) -> tuple[int, Any]:
    """Status and body of the answer to bytes on a connection that the server ends."""
    with socket.create_connection(address(server), timeout=30) as connection:
        connection.sendall(sent)
        came = b"".join(iter(lambda: connection.recv(65536), b""))
    return parsed(came)


def parsed(came: bytes) -> tuple[int, Any]:
    head, _, body = came.partition(b"\r\n\r\n")
    response = httpx.Response(int(head.split()[1]), content=body)
    return response.status_code, response.json()


def send(client: httpx.Client, server: LiveServer, request: Request) -> tuple[int, Any]:
    if request.raw is not None:
        return raw(server, request.raw)
    headers = {} if request.content_type is None else {"content-type": request.content_type}
    response = client.request(request.method, request.path, content=request.body, headers=headers)
    assert response.headers["content-type"] == JSON
    return response.status_code, response.json()


def test_a_thousand_malformed_requests(server: LiveServer, answer: str) -> None:
    kinds: collections.Counter[str] = collections.Counter()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        document = client.get("/openapi.json").json()
        for request in Malformed(document, "tiny").requests(seed=5, count=1000):
            shown = (request.kind, request.path, (request.raw or request.body)[:300])
            status, body = send(client, server, request)
            assert 400 <= status < 500, (*shown, status, body)
            assert re.search(request.words, body["error"]["message"]), (*shown, body)
            kinds[request.kind] += 1
        again = client.post("/v1/completions", json=QUESTION).json()
    assert again["choices"][0]["text"] == answer
    assert len(kinds) >= 22
    assert min(kinds.values()) >= 30


class Others:
    """A client that asks again and again while something goes on, and is always answered as ever."""

    def __init__(self, server: LiveServer, answer: str):
        self._url = server.url + "/v1/completions"
        self._answer = answer
        self.served = 0

    async def during(self, work: Awaitable[Any]) -> Any:
        """Ask until ``work`` is done; its result."""
        task = asyncio.ensure_future(work)
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                while not task.done() or self.served == 0:
                    response = await client.post(self._url, json=QUESTION)
                    assert response.status_code == 200, response.text
                    assert response.json()["choices"][0]["text"] == self._answer
                    self.served += 1
            return await task
        finally:
            task.cancel()


async def drip(server: LiveServer, start: bytes) -> bytes:
    """Send ``start``, then a byte now and then, until the server has had enough; what it says."""
    reader, writer = await asyncio.open_connection(*address(server))
    writer.write(start)
    came = b""
    while True:
        try:
            piece = await asyncio.wait_for(reader.read(4096), TIMEOUT / 10)
        except TimeoutError:
            writer.write(b"a")
            continue
        came += piece
        if not piece:
            writer.close()
            return came


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = HEAD + b"content-type: application/json\r\n"


def test_headers_and_bodies_that_drip(server: LiveServer, answer: str) -> None:
    starts = [
        HEAD + b"x-y: ",
        BODY + b'content-length: 1000\r\n\r\n{"prompt": "',
        BODY + b"transfer-encoding: chunked\r\n\r\n7d0\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HEAD + b"x-y: ",  # the second request of a connection
    ]

    async def run() -> list[bytes]:
        others = Others(server, answer)
        drips = asyncio.gather(*(drip(server, start) for start in starts * 20))
        ends: list[bytes] = await others.during(drips)
        assert others.served > 3
        return ends

    for i, came in enumerate(asyncio.run(run())):
        if i % 4 == 3:
            first, _, came = came.partition(b"HTTP/1.1 408")
            assert first.startswith(b"HTTP/1.1 200")
            came = b"HTTP/1.1 408" + came
        status, body = parsed(came)
        assert status == 408
        assert ("body" if i % 4 in (1, 2) else "headers") in body["error"]["message"]
        assert "--client-timeout" in body["error"]["message"]


def test_500_idle_connections(server: LiveServer, answer: str) -> None:
    async def run() -> None:
        others = Others(server, answer)

        async def crowd() -> list[asyncio.StreamReader]:
            opened = [await asyncio.open_connection(*address(server)) for _ in range(500)]
            readers = [reader for reader, _ in opened]
            # Only so many stay; the longest idle make room for those that come.
            await asyncio.gather(*(reader.read() for reader in readers[: 500 - CONNECTIONS]))
            # In time the others end, too: who opens a connection is to ask for something.
            await asyncio.gather(*(reader.read() for reader in readers))
            for _, writer in opened:
                writer.close()
            return readers

        readers = await others.during(crowd())
        assert all(reader.at_eof() for reader in readers)
        assert others.served > 3

    asyncio.run(run())


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_body_of_50_mb(server: LiveServer, answer: str, declared: bool) -> None:
    size = 50 * 10**6

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * (size // 50)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            headers = {"content-type": JSON}
            content: Any = b"x" * size if declared else pieces()
            return await client.post(server.url + "/v1/completions", content=content, headers=headers)

    async def run() -> None:
        others = Others(server, answer)
        response = await others.during(post())
        assert response.status_code == 413, response.text
        assert "--max-body-bytes" in response.json()["error"]["message"]

    asyncio.run(run())


def test_a_body_as_large_as_is_taken(server: LiveServer, answer: str) -> None:
    body = b'{"prompt": "' + b"word " * (6 * 10**6) + b'"}'

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            url = server.url + "/v1/completions"
            return await client.post(url, content=body, headers={"content-type": JSON})

    async def run() -> None:
        response = await Others(server, answer).during(post())
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(run())


def test_a_client_that_does_not_read_is_cut_off(server: LiveServer, answer: str) -> None:
    """As one whose machine has gone is: it keeps the connection open, and takes nothing."""
    client = Stopped(server.url, LONG | {"max_tokens": 3900})
    try:
        assert until(lambda: server.metric("vllm:num_requests_running") == 1)
        asyncio.run(Others(server, answer).during(asyncio.sleep(0)))
        assert until(client.cut_off, 60)
        assert until(lambda: server.metric("vllm:num_requests_running") == 0, 60)
    finally:
        client.close()
