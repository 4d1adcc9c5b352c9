"""The socket, and the HTTP server on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from plait.server import tls
from plait.server.connections import Limits, openable, protocol
from plait.server.settings import ServerSettings

_BACKLOG = 2048
_CLOSE_SECONDS = 5
"""Longest that connections may take to end once nobody is answered any more."""


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """The socket to serve on. Bound before the model is loaded: a port in use should not cost a load.

    ``shared``: others may be bound to the same port, among which the system spreads connections.

    Raises:
        ValueError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        hint = "; choose another --port, or end what listens there" if error.errno == errno.EADDRINUSE else ""
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return sock


def bind_several(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets on one port, one for each API process. Raises as ``bind``.

    They listen already: connections wait for the processes.
    """
    # A shared port can be had while another server of this user shares it: such a one is found like this.
    with bind(host, port) as alone:
        port = alone.getsockname()[1]
    socks = [bind(host, port, shared=True) for _ in range(count)]
    for sock in socks:
        sock.listen(_BACKLOG)
    return socks


def url_of(sock: socket.socket, secure: bool) -> str:
    """How clients write the address of ``sock``."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Listener:
    """An HTTP server on one socket, for one application.

    Raises:
        ValueError: TLS settings that cannot hold.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, settings: ServerSettings) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(Limits(settings.client_timeout, openable(settings.max_connections))),
            log_config=None,
            log_level=settings.uvicorn_log_level,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            **tls.uvicorn_settings(settings),
        )
        self._sock = sock
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; returns once connections are taken."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self._serving

    async def close(self, at_once: bool = False) -> None:
        """Take no more connections and end those there are; ``at_once``: without waiting for slow readers."""
        if self._serving is None:
            return
        if at_once:
            self._server.config.timeout_graceful_shutdown = 1
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers: they would kill this process before the engine is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """SIGINT and SIGTERM as events: ``asked`` is set by the first, ``urgent`` by the second."""

    _numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def __enter__(self) -> Signals:
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self) -> None:
        (self.urgent if self.asked.is_set() else self.asked).set()
