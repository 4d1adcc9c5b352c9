"""Running the server: load the model, serve until told to stop, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from plait.config import EngineArgs
from plait.engine.outputs import EngineDeadError
from plait.server.app import create_app
from plait.server.connections import Limits, openable, protocol
from plait.server.settings import ServerSettings

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where there is one."""
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(coroutine)


def bind(host: str, port: int) -> socket.socket:
    """The socket to serve on. Bound before the model is loaded: a port in use should not cost a load.

    Raises:
        ValueError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        hint = "; choose another --port, or end what listens there" if error.errno == errno.EADDRINUSE else ""
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return sock


async def serve(
    args: EngineArgs,
    settings: ServerSettings,
    *,
    on_stage: Callable[[str], None] | None = None,
    on_ready: Callable[[AsyncEngine, str], None] | None = None,
) -> None:
    """Load the model and serve it until SIGTERM or SIGINT; the engine process ends before this returns.

    Args:
        on_stage: told the name of each stage of loading as it begins.
        on_ready: told the engine and the server's address, once it takes requests.

    Raises:
        ValueError: settings or a model that cannot work.
    """
    from plait.engine.async_engine import AsyncEngine

    sock = bind(settings.host, settings.port)
    task = asyncio.current_task()
    assert task is not None
    with contextlib.closing(sock), _Signals(task.cancel) as signals:
        try:
            engine = await AsyncEngine.start(args, on_stage=on_stage, limits_both=True)
        except asyncio.CancelledError:
            return  # told to stop while loading
        try:
            config = uvicorn.Config(
                create_app(engine, settings),
                http=protocol(Limits(settings.client_timeout, openable(settings.max_connections))),
                ws="none",
                log_level=settings.log_level,
                access_log=False,
                # Ours comes first, and gives every request its error; this one is for connections that hang.
                timeout_graceful_shutdown=round(settings.shutdown_timeout) + 5,
            )
            server = _Server(config)
            ending = _Ending(server, engine, settings.shutdown_timeout)
            signals.action = ending.signal
            serving = asyncio.ensure_future(server.serve(sockets=[sock]))
            watching = asyncio.ensure_future(_report_death(engine))
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            if on_ready is not None and not serving.done():
                on_ready(engine, _url(sock))
            await serving
            watching.cancel()
        finally:
            await engine.close()


async def _report_death(engine: AsyncEngine) -> None:
    """Log the end of the engine process. The server stays, answers 503, and leaves the rest to whoever
    started it."""
    while True:
        try:
            engine.check_health()
        except EngineDeadError as error:
            log.error("%s; /health answers 503 from now on", error)
            return
        await asyncio.sleep(0.5)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers: they would kill this process before the engine is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ending:
    """What a signal does: take no new requests and end with the last one. When the time is up, or at a
    second signal, requests that still run get an error that says so."""

    def __init__(self, server: uvicorn.Server, engine: AsyncEngine, seconds: float):
        self._server = server
        self._engine = engine
        self._seconds = seconds

    def signal(self) -> None:
        if self._server.should_exit:
            self._give_up()
            return
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._seconds, self._give_up)

    def _give_up(self) -> None:
        self._engine.fail("the server is shutting down; send the request to another, or again later")


class _Signals:
    """Calls ``action`` on SIGINT and SIGTERM."""

    _numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, action: Callable[[], object]):
        self.action = action

    def __enter__(self) -> _Signals:
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, lambda: self.action())
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)
