"""Bodies that are too large are refused before they are held in memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.server.errors import APIError


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
        # What is left of the body is not read: the connection ends with the answer.
        await error.response({"connection": "close"})(scope, receive, send)


class _TooLarge(BaseException):
    """No handler of the application may answer in its place."""
