"""The OpenAPI document: what each operation answers, errors included, and how it is asked.

FastAPI makes the document of the routes; what it cannot know is said here.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from plait.server.answer_shapes import Error
from plait.server.keys import GUARDED

_ERRORS = {
    400: "The request cannot be served as asked; the message names the field and the fault.",
    401: "The server asks for a key, and it is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests wait for their first token; Retry-After says when to come back.",
    500: "The model gave nothing usable, or plait has a fault.",
    503: "The engine process has ended, or the server is shutting down or full.",
    504: "The request's own timeout came before its first token.",
}
Responses = dict[int | str, dict[str, Any]]


def answers(
    shape: type[BaseModel] | None = None, *errors: int, stream: str | None = None, text: str | None = None
) -> Responses:
    """``responses`` of a route.

    Args:
        shape: of the answer as JSON; None: there is no JSON.
        errors: statuses of its errors.
        stream: what the events are, where the request may ask for a stream.
        text: media type of an answer that is text.
    """
    good: dict[str, Any] = {"description": "The answer."}
    if shape is not None:
        good["model"] = shape
    if stream is not None:
        good["description"] += f" With `stream: true`, server-sent events: {stream}"
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    if text is not None:
        good["content"] = {text: {"schema": {"type": "string"}}}
    made: Responses = {200: good}
    return made | {status: {"model": Error, "description": _ERRORS[status]} for status in errors}


BODY_ERRORS = (400, 401, 404, 408, 413, 500, 503)
ANSWER_ERRORS = (*BODY_ERRORS, 429, 504)


def install(app: FastAPI, *, key: bool) -> None:
    """Have ``app`` give a document that is true. ``key``: the server asks for one."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, operations in made["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's; faults of requests are 400 here
                    if key and path.startswith(GUARDED):
                        operation["security"] = [{"bearer": []}, {"key": []}]
            schemas = made["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            if key:
                made["components"]["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                }
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
