"""OpenTelemetry: a span for each request to the engine. Nothing of it is imported unless it was asked for.

Names of attributes are those of the semantic conventions for generative AI, and vLLM's, which are older.
"""

from __future__ import annotations

import asyncio
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from plait import __version__
from plait.engine.beside import beside
from plait.logs import request_id
from plait.server.course import Course

if TYPE_CHECKING:
    from plait.server.desk import Order

_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
"""of the HTTP request: which trace it belongs to"""
_FLUSH_SECONDS = 3.0
_FIELDS = ("traceparent", "tracestate")


def check_endpoint(endpoint: str) -> str:
    """The address that spans go to; one without a path gets the usual one.

    Raises:
        ValueError: it is no address, or the packages are missing.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        example = "http://localhost:4318/v1/traces"
        raise ValueError(f"--otlp-traces-endpoint {endpoint}: write it like {example} (OTLP over HTTP)")
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ModuleNotFoundError as missing:
        message = f"--otlp-traces-endpoint needs a package that is not installed ({missing.name})"
        raise ValueError(f"{message}: pip install 'plait[otel]'") from None
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


class Tracer:
    """Sends spans, in the background.

    Args:
        endpoint: as ``check_endpoint`` returned it.
        model: by the name that clients use.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "plait"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("plait", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def __call__(self, order: Order, course: Course) -> None:
        """The request is over."""
        from opentelemetry.trace import SpanKind, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(_headers.get() or {}),
            kind=SpanKind.SERVER,
            attributes=attributes(order, course, self._model),
            start_time=course.began_ns,
        )
        if course.fault is not None:
            span.set_status(StatusCode.ERROR, f"{type(course.fault).__name__}: {course.fault}")
        span.end(course.began_ns + int(course.last * 1e9))

    async def close(self) -> None:
        """Send what is left, for as long as that may take."""
        milliseconds = int(_FLUSH_SECONDS * 1000)
        try:
            async with asyncio.timeout(2 * _FLUSH_SECONDS):
                await beside(self._provider.force_flush, milliseconds)
                await beside(self._provider.shutdown)
        except TimeoutError:
            return


def attributes(order: Order, course: Course, model: str) -> dict[str, Any]:
    """What a span tells; of times only those that are known."""
    params, prompt_tokens = order.params, len(order.prompt.token_ids)
    reasons = [course.reasons.get(i, "abort") for i in range(params.n)]
    told: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if order.request_id.startswith("cmpl") else "chat",
        "gen_ai.provider.name": "plait",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": order.request_id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed if (params.seed or 0) < 2**63 else None,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": course.tokens,
        "gen_ai.usage.cache_read.input_tokens": course.cached,
        "plait.request_id": request_id.get(),
        # as vLLM names them
        "gen_ai.request.id": order.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": params.n,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": course.tokens,
        "gen_ai.latency.time_in_queue": course.queued,
        "gen_ai.latency.time_to_first_token": course.first,
        "gen_ai.latency.time_in_model_prefill": course.prefill,
        "gen_ai.latency.time_in_model_decode": course.decode,
        "gen_ai.latency.time_in_model_inference": course.inference,
        "gen_ai.latency.e2e": course.last,
    }
    return {name: value for name, value in told.items() if value is not None}


class KeepTrace:
    """Remembers, while a request is answered, which trace it belongs to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        _headers.set({name: headers[name] for name in _FIELDS if name in headers})
        await self._app(scope, receive, send)
