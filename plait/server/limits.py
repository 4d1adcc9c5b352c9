"""Bodies that are too large are refused before they are held in memory."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.server.errors import APIError

_DISCARD_SECONDS = 10.0
_DISCARD_BYTES = 2**26
"""of a body that was refused are read, and dropped, before the connection ends"""


class LimitBody:
    """Answers 413 as soon as a body is known to be larger than ``most`` bytes: by its declared length, or,
    where that is missing, while it comes in."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await self._refuse(scope, receive, send)
            return
        came = 0

        async def counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._most:
                raise _TooLarge
            return message

        try:
            await self._app(scope, counted, send)
        except _TooLarge:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than {self._most} bytes, the most that this server takes"
        error = APIError(413, f"{message} (--max-body-bytes)", code="body_too_large")
        response = error.response({"connection": "close"})
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
        # A connection that ends while its client still sends is reset, and takes the answer with it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._discard(receive), _DISCARD_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        left, more = max(self._most, _DISCARD_BYTES), True
        while more and left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)


class _TooLarge(BaseException):
    """No handler of the application may answer in its place."""
