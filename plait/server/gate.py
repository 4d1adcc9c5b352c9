"""The gate of the server: what is let in, by what the server can do at the moment."""

from __future__ import annotations

import asyncio
from enum import Enum

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.server.errors import APIError

PROBES = frozenset({"/live", "/health", "/ping", "/ready", "/metrics", "/version"})
"""Paths for whoever watches the server. They are answered at any time, and count as nobody's request."""

_RETRY_LOADING = 5
_RETRY_DRAINING = 1
"""seconds until a client may try again: elsewhere, or here once the server is back"""
_DISCARDED = 4 * 2**20
"""bytes of a refused body that are read, so that its sender gets to read the answer"""
_DISCARD_SECONDS = 5.0


class Phase(Enum):
    LOADING = "the model is being loaded"
    SERVING = "requests are taken"
    DRAINING = "the server is shutting down and takes no new requests"


class Gate:
    """The ASGI application in front of the API, from the first moment of the server to its last.

    Until ``open`` is called there is no API: requests get a 503 with Retry-After. So do new ones after
    ``drain``, while those that are inside go on. The socket listens all the time: nobody's connection is
    refused.

    Args:
        root_path: path under which a proxy shows the server.
    """

    def __init__(self, root_path: str = "") -> None:
        self.phase = Phase.LOADING
        self.inside = 0
        """requests that are being answered, probes not counted"""
        self._root_path = root_path
        self._app: ASGIApp | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, app: ASGIApp) -> None:
        """Let requests in; ``app`` answers them."""
        self._app = app
        self.phase = Phase.SERVING

    def drain(self) -> None:
        """Let no more requests in."""
        self.phase = Phase.DRAINING

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (response := self._answer(scope)) is not None:
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                await _discard(receive)
            await response(scope, receive, send)
        else:
            assert self._app is not None
            if self._path(scope) in PROBES:
                await self._app(scope, receive, send)
            else:
                await self._enter(self._app, scope, receive, send)

    async def _enter(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside += 1
        self._empty.clear()
        try:
            await app(scope, receive, send)
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def _path(self, scope: Scope) -> str:
        path: str = scope["path"]
        return path.removeprefix(self._root_path)

    def _answer(self, scope: Scope) -> Response | None:
        """What the gate answers by itself; None: the request may pass."""
        path = self._path(scope)
        match self.phase:
            case Phase.SERVING:
                return None
            case Phase.LOADING:
                return Response() if path == "/live" else _closed(self.phase, "loading", _RETRY_LOADING)
            case Phase.DRAINING:
                if path in PROBES and path != "/ready" and self._app is not None:
                    return None
                if path == "/live":
                    return Response()
                return _closed(self.phase, "draining", _RETRY_DRAINING)


def _closed(phase: Phase, code: str, seconds: int) -> Response:
    error = APIError(503, f"{phase.value}; try again in {seconds} s", code=code, retry_after=seconds)
    # A connection that is kept would be one to a server that is about to end.
    return error.response({"connection": "close"} if phase is Phase.DRAINING else None)


async def _discard(receive: Receive) -> None:
    """Read a body that nobody wants. Closing the connection on unread bytes would reset it, and the answer
    with it."""
    request = Request({"type": "http"}, receive)
    size = 0
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > _DISCARDED:
                    return
    except Exception:
        return  # slow, or gone: it gets its answer all the same, if it still reads
