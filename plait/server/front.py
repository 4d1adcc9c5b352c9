"""What stands in front of the gate, and so before every answer, whatever state the server is in."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from plait.server.journal import Journal
from plait.server.settings import ServerSettings
from plait.server.tracing import KeepTrace


def front(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """``app`` behind what the settings ask for."""
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=("retry-after", "x-request-id"),
        )
    if settings.otlp_traces_endpoint is not None:
        app = KeepTrace(app)
    omits = [path.strip() for path in settings.disable_access_log_for_endpoints.split(",")]
    return Journal(app, writes=not settings.disable_access_log, omits=omits)
