"""An application over a scripted engine on a real port, for clients that bring their own transport."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from scripted import ScriptedEngine

from plait.server import ServerSettings, create_app
from plait.server.connections import Limits, protocol


@contextlib.contextmanager
def listening(engine: ScriptedEngine, settings: ServerSettings | None = None) -> Iterator[str]:
    """The address at which the application answers."""
    sock = socket.create_server(("127.0.0.1", 0))
    settings = settings or ServerSettings()
    app: Any = create_app(engine, settings)  # type: ignore[arg-type]
    kind = protocol(Limits(settings.client_timeout, settings.max_connections))
    server = uvicorn.Server(uvicorn.Config(app, http=kind, ws="none", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
