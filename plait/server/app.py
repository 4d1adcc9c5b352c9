"""The HTTP application over one engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.responses import Response as HTTPResponse
from prometheus_client import CONTENT_TYPE_LATEST

from plait import __version__
from plait.engine.outputs import EngineDeadError
from plait.server import errors, openapi
from plait.server.answer_shapes import (
    ChatCompletion,
    Completion,
    Message,
    Model,
    Models,
    Response,
    Text,
    TokenCount,
    Tokens,
    Version,
)
from plait.server.anthropic_messages import CountRequest, MessagesRequest
from plait.server.chat import chat_completions
from plait.server.completions import completions
from plait.server.debug import add_debug
from plait.server.json_body import JSONRoute
from plait.server.keys import RequireKey
from plait.server.limits import LimitBody
from plait.server.messages import count_tokens, create_message
from plait.server.openapi import ANSWER_ERRORS, BODY_ERRORS, answers
from plait.server.protocol import ChatRequest, CompletionRequest
from plait.server.responses import create_response
from plait.server.responses_request import ResponsesRequest
from plait.server.service import Service
from plait.server.settings import ServerSettings
from plait.server.shared import Shared
from plait.server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine


def create_app(
    engine: AsyncEngine, settings: ServerSettings | None = None, shared: Shared | None = None
) -> FastAPI:
    """The application that serves ``engine``; starting and closing the engine is up to the caller.

    ``shared``: what this process has in common with others that serve the same engine.
    """
    settings = settings or ServerSettings()
    app = FastAPI(title="plait", version=__version__, root_path=settings.root_path)
    service = Service(engine, settings, shared or Shared())
    app.state.service = service
    app.router.route_class = JSONRoute
    errors.install(app)
    openapi.install(app, key=bool(settings.api_keys))
    _add_openai(app, service)
    _add_anthropic(app, service)
    _add_tokens(app, service)
    _add_operations(app, service)
    app.add_middleware(LimitBody, most=settings.max_body_bytes)
    if settings.debug:
        add_debug(app, service)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    chunks = "chunks of the answer, at last `[DONE]`."

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=answers(ChatCompletion, *ANSWER_ERRORS, stream=chunks),
    )
    async def post_chat_completions(body: ChatRequest, request: Request) -> HTTPResponse:
        return await chat_completions(service, body, request)

    @app.post(
        "/v1/completions", response_model=None, responses=answers(Completion, *ANSWER_ERRORS, stream=chunks)
    )
    async def post_completions(body: CompletionRequest, request: Request) -> HTTPResponse:
        return await completions(service, body, request)

    named = "events with a name and a number."

    @app.post("/v1/responses", response_model=None, responses=answers(Response, *ANSWER_ERRORS, stream=named))
    async def post_responses(body: ResponsesRequest, request: Request) -> HTTPResponse:
        return await create_response(service, body, request)

    @app.get("/v1/models", response_model=None, responses=answers(Models, 401))
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, created)]}

    @app.get("/v1/models/{name:path}", response_model=None, responses=answers(Model, 401, 404))
    async def get_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, created)


def _add_anthropic(app: FastAPI, service: Service) -> None:
    events = "of the message, of its blocks, and of their growth."

    @app.post("/v1/messages", response_model=None, responses=answers(Message, *ANSWER_ERRORS, stream=events))
    async def post_messages(body: MessagesRequest, request: Request) -> HTTPResponse:
        return await create_message(service, body, request)

    @app.post("/v1/messages/count_tokens", response_model=None, responses=answers(TokenCount, *BODY_ERRORS))
    async def post_count_tokens(body: CountRequest) -> dict[str, int]:
        return await count_tokens(service, body)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model=None, responses=answers(Tokens, *BODY_ERRORS))
    async def post_tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await tokenize(service, body)

    @app.post("/detokenize", response_model=None, responses=answers(Text, *BODY_ERRORS))
    async def post_detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return detokenize(service, body)


def _model(service: Service, created: int) -> dict[str, Any]:
    info, form = service.engine.info, service.format
    return {
        "id": service.model,
        "object": "model",
        "created": created,
        "owned_by": "plait",
        "root": str(info.path),
        "max_model_len": info.max_model_len,
        "family": info.family,
        "capabilities": {
            "completions": True,
            "chat": form is not None,
            "reasoning": form.reasoning if form else None,
            "tools": form.tools if form else None,
            "vision": False,
            "embeddings": False,
        },
    }


def _add_operations(app: FastAPI, service: Service) -> None:
    async def health() -> HTTPResponse:
        try:
            service.engine.check_health()
        except EngineDeadError as error:
            return errors.as_api_error(error).response()
        return HTTPResponse(status_code=200)

    # While there is an engine these are one question; the gate answers at other times.
    probes = [(path, "GET") for path in ("/live", "/health", "/ready", "/ping")]
    for path, method in (*probes, ("/ping", "POST")):
        app.add_api_route(
            path, health, methods=[method], response_model=None, responses=answers(None, 503),
            operation_id=f"{method.lower()}_{path[1:]}", response_class=HTTPResponse,
        )  # fmt: skip

    @app.get("/version", response_model=None, responses=answers(Version))
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get(
        "/metrics", response_model=None, responses=answers(text="text/plain"), response_class=HTTPResponse
    )
    async def metrics() -> HTTPResponse:
        page = await service.metrics.page(service.engine)
        return PlainTextResponse(page, media_type=CONTENT_TYPE_LATEST)
