"""A client that reads answers from its socket as they are: many streams at once, at little cost."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from typing import Any

import httpx


def request(path: str, body: dict[str, Any]) -> bytes:
    """A POST on a connection of its own."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


def unchunked(body: bytes) -> bytes:
    """The body without its chunked coding; a body that was cut off ends where it was."""
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(body[:length])
        body = body[length + 2 :]
    return b"".join(pieces)


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of the answer, once it is whole."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(request(path, body))
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), unchunked(rest) if b"chunked" in head.lower() else rest


async def posts(url: str, path: str, bodies: list[dict[str, Any]]) -> list[bytes]:
    """The bodies of the answers, all asked for at once."""
    answers = await asyncio.gather(*(post(url, path, body) for body in bodies))
    for status, body in answers:
        assert status == 200, body
    return [body for _, body in answers]


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream."""
    blocks = [block.rpartition(b"data: ")[2] for block in body.split(b"\n\n")]
    return [json.loads(block) for block in blocks if block and block != b"[DONE]"]


LONG: dict[str, Any] = {
    "prompt": "Once upon a time", "max_tokens": 30_000, "ignore_eos": True, "temperature": 0.8, "seed": 3,
    "stream": True, "logprobs": 20, "return_token_ids": True,
}  # fmt: skip
"""A completion of about 100 MB, if it were all sent."""


class Stopped:
    """A client that asks for an answer and does not read it."""

    def __init__(self, url: str, body: dict[str, Any]):
        address = httpx.URL(url)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((address.host, address.port))
        self._socket.sendall(request("/v1/completions", body))
        self._socket.settimeout(60)

    def read(self) -> tuple[int, bytes]:
        """All that comes until the server ends the connection: status and body."""
        came = b"".join(iter(lambda: self._socket.recv(65536), b""))
        head, _, rest = came.partition(b"\r\n\r\n")
        return int(head.split()[1]), unchunked(rest)

    def cut_off(self) -> bool:
        """Whether the server has reset the connection; what lies unread stays unread."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))

    def close(self) -> None:
        self._socket.close()
