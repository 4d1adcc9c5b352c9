"""Errors in OpenAI's shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.engine.outputs import EngineDeadError, NobodyReads, RequestFailed, RequestRefused

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    405: "invalid_request_error",
    503: "service_unavailable_error",
}


RETRY_DEAD = 10
"""seconds until a client may try again: by then the server may have been started anew"""


class APIError(Exception):
    """An answer that is an error: HTTP status, message, and the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        """seconds after which the client may try again"""

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "internal_server_error" if self.status >= 500 else _TYPES[400])
        error = {
            "message": _printable(self.message),
            "type": kind,
            "param": None if self.param is None else _printable(self.param),
            "code": self.code or self.status,
        }
        # "type" is what the Messages API has beside the error.
        return msgspec.json.encode({"type": "error", "error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        headers = dict(headers or {})
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return Response(self.body(), self.status, headers, media_type="application/json")

    def raw(self) -> bytes:
        """The response as it goes over a connection that ends with it, for where no request was read."""
        response = self.response({"connection": "close"})
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        return b"\r\n".join([*lines, b"", bytes(response.body)])


def _printable(text: str) -> str:
    """Text that came from a client, perhaps with unpaired surrogates, as text that can be sent."""
    return text.encode("utf-8", "replace").decode()


def as_api_error(error: Exception) -> APIError:
    """The answer owed for an exception that came out of serving a request."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineDeadError):
        message = str(error) or "the engine process has ended"
        return APIError(503, message, code="engine_dead", retry_after=RETRY_DEAD)
    if isinstance(error, RequestRefused):
        return APIError(400, str(error))
    if isinstance(error, NobodyReads):
        return APIError(408, f"the client reads too slowly: {error}", code="client_too_slow")
    if isinstance(error, RequestFailed):
        return APIError(500, str(error))
    log.error("a request failed", exc_info=error)
    return APIError(500, f"internal error: {type(error).__name__}: {error}")


def install(app: FastAPI) -> None:
    """Make every error that leaves ``app`` one in OpenAI's shape."""

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _from_validation(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        return APIError(error.status_code, message).response(error.headers)

    async def known(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    for kind in (APIError, EngineDeadError, RequestFailed, RequestRefused):
        app.add_exception_handler(kind, known)
    app.add_middleware(_LastResort)


class _LastResort:
    """Answers what nothing else did. (A handler for ``Exception`` would answer too, and then raise it
    again, upon which the connection is dropped and the client's next request with it.)"""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await as_api_error(error).response()(scope, receive, send)


def unknown_field(name: str, known: list[str]) -> str:
    """Message about a field that no request has, with the nearest one that exists."""
    near = get_close_matches(name, known, n=1)
    return f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _from_validation(error: RequestValidationError) -> APIError:
    first: dict[str, Any] = dict(error.errors()[0])
    kind = first["type"]
    where = [str(p) for p in first["loc"][1:]]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return APIError(400, f"the body is not valid JSON: {reason} at character {first['loc'][-1]}")
    if not where and kind in ("missing", "model_attributes_type"):
        hint = ""
        if isinstance(error.body, bytes):  # it was not read as JSON
            hint = "; send it with Content-Type: application/json"
        return APIError(400, f"the body must be a JSON object{hint}")
    if kind == "not_served":
        return APIError(400, first["msg"], param=first["ctx"]["field"])
    param = ".".join(where)
    if kind == "missing":
        return APIError(400, f"{param} is missing", param=param)
    if kind == "extra_forbidden":
        return APIError(400, f"unknown field {param!r}", param=param)
    # Unions report one fault per member under "field.member"; the field itself is what the user sent.
    return APIError(400, f"{param}: {first['msg']}", param=where[0])
