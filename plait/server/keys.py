"""Keys that clients must send."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.server.errors import APIError

GUARDED = ("/v1", "/tokenize", "/detokenize", "/debug")
"""The rest is for probes and scrapers."""


class RequireKey:
    """Refuses requests to guarded paths that bring none of ``keys``.

    A comparison takes as long for a key that is nearly right as for any other: digests are compared, all of
    them, each in constant time.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._guarded(scope) and not self._holds(_key_of(scope)):
            message = "the API key is missing or wrong: send it as Authorization: Bearer <key>"
            error = APIError(401, message, code="invalid_api_key")
            await error.response({"www-authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _holds(self, given: bytes) -> bool:
        digest = _digest(given)
        return sum([secrets.compare_digest(digest, known) for known in self._digests]) > 0

    @staticmethod
    def _guarded(scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            return False
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(GUARDED)


def _key_of(scope: Scope) -> bytes:
    """The key of a request: behind "Bearer" (in any case), or where Anthropic's clients put it."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if (given := headers.get(b"authorization")) is None:
        return headers.get(b"x-api-key", b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
