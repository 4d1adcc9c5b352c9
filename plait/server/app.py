"""The HTTP application over one engine."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from plait import __version__
from plait.engine.outputs import EngineDeadError
from plait.server import errors
from plait.server.chat import chat_completions
from plait.server.completions import completions
from plait.server.debug import add_debug
from plait.server.protocol import ChatRequest, CompletionRequest
from plait.server.service import Service
from plait.server.settings import ServerSettings

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves ``engine``; starting and closing the engine is up to the caller."""
    settings = settings or ServerSettings()
    app = FastAPI(title="plait", version=__version__, root_path=settings.root_path)
    service = Service(engine, settings)
    app.state.service = service
    errors.install(app)
    _add_openai(app, service)
    _add_operations(app, service)
    if settings.debug:
        add_debug(app, service)
    if settings.api_key:
        app.add_middleware(RequireKey, key=settings.api_key)
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.post("/v1/chat/completions", response_model=None)
    async def post_chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat_completions(service, body, request)

    @app.post("/v1/completions", response_model=None)
    async def post_completions(body: CompletionRequest, request: Request) -> Response:
        return await completions(service, body, request)

    @app.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, created)]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, created)


def _model(service: Service, created: int) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": created,
        "owned_by": "plait",
        "max_model_len": service.engine.info.max_model_len,
    }


def _add_operations(app: FastAPI, service: Service) -> None:
    async def health() -> Response:
        try:
            service.engine.check_health()
        except EngineDeadError as error:
            return errors.as_api_error(error).response()
        return Response(status_code=200)

    app.add_api_route("/health", health, methods=["GET"], response_model=None)
    app.add_api_route("/ping", health, methods=["GET", "POST"], response_model=None)

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        page = await service.metrics.page(service.engine)
        return PlainTextResponse(page, media_type=CONTENT_TYPE_LATEST)


class RequireKey:
    """Refuses requests under /v1 and /debug that lack the key. The rest is for probes and scrapers."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._guarded(scope):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                message = "the API key is missing or wrong: send it as Authorization: Bearer <key>"
                error = errors.APIError(401, message, code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _guarded(scope: Scope) -> bool:
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(("/v1", "/debug"))
