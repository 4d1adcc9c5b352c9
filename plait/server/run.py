"""Running the server: load the model, serve until told to stop, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from plait.config import EngineArgs
from plait.engine.outputs import EngineDeadError
from plait.server.app import create_app
from plait.server.drain import drain
from plait.server.front import front
from plait.server.gate import Gate
from plait.server.listener import Listener, Signals, bind, url_of
from plait.server.settings import ServerSettings
from plait.server.stats_line import log_stats

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where there is one."""
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(coroutine)


async def serve(
    args: EngineArgs,
    settings: ServerSettings,
    *,
    on_stage: Callable[[str], None] | None = None,
    on_ready: Callable[[AsyncEngine, str], None] | None = None,
) -> None:
    """Load the model and serve it until SIGTERM or SIGINT; the engine process ends before this returns.

    The socket listens from the beginning to the end: while the model is loaded, and while the last answers
    are given, requests get a 503 that says so.

    Args:
        on_stage: told the name of each stage of loading as it begins.
        on_ready: told the engine and the server's address, once it takes requests.

    Raises:
        ValueError: settings or a model that cannot work.
    """
    if settings.api_server_count > 1:
        from plait.server.run_several import serve_several

        await serve_several(args, settings, on_stage=on_stage, on_ready=on_ready)
        return
    gate = Gate(settings.root_path)
    sock = bind(settings.host, settings.port)
    with contextlib.closing(sock), Signals() as signals:
        listener = Listener(front(gate, settings), sock, settings)
        await listener.start()
        try:
            engine = await unless_told(signals, _load(args, settings, on_stage))
            if engine is None:
                return
            try:
                app = create_app(engine, settings)
                gate.open(app)
                if on_ready is not None:
                    on_ready(engine, url_of(sock, settings.secure))
                async with watched(engine, settings) as ends:
                    await until_told(signals, *ends)
                    await drain(gate, engine, signals, settings.shutdown_timeout)
                if not signals.urgent.is_set():
                    await app.state.service.close()
            finally:
                await engine.close(at_once=signals.urgent.is_set())
        finally:
            await listener.close(at_once=signals.asked.is_set() and gate.inside > 0)


async def _load(
    args: EngineArgs, settings: ServerSettings, on_stage: Callable[[str], None] | None
) -> AsyncEngine:
    from plait.engine.async_engine import AsyncEngine

    return await AsyncEngine.start(args, on_stage=on_stage, beside=[os.getpid()], logs=settings.logs)


async def unless_told(signals: Signals, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None if a signal came first, upon which ``work`` was cancelled."""
    loading = asyncio.ensure_future(work)
    told = asyncio.ensure_future(signals.asked.wait())
    try:
        await asyncio.wait({loading, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.wait({loading})  # it ends the engine process, if there is one
    return None if loading.cancelled() else loading.result()


@contextlib.asynccontextmanager
async def watched(engine: AsyncEngine, settings: ServerSettings) -> AsyncIterator[list[asyncio.Future[None]]]:
    """Write meanwhile what is to be known of the engine. Gives what is to end the server: its death, if so
    asked."""
    death = asyncio.ensure_future(_report_death(engine, raises=settings.exit_with_engine))
    watching = [death]
    if not settings.disable_log_stats:
        watching.append(asyncio.ensure_future(log_stats(engine.stats, settings.log_stats_interval)))
    try:
        yield [death] if settings.exit_with_engine else []
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def until_told(signals: Signals, *ends: asyncio.Future[None]) -> None:
    """Wait for a signal, or for what is to end the server as well. Raises what that raises."""
    told = asyncio.ensure_future(signals.asked.wait())
    try:
        any_of: set[asyncio.Future[Any]] = {told, *ends}
        await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            if end.done():
                end.result()
    finally:
        told.cancel()


async def _report_death(engine: AsyncEngine, raises: bool) -> None:
    """Log the end of the engine process. Unless this ``raises``, the server stays, answers 503, and leaves
    the rest to whoever started it."""
    while True:
        try:
            engine.check_health()
        except EngineDeadError as error:
            log.error("%s; /health answers 503 from now on", error)
            if raises:
                raise
            return
        await asyncio.sleep(0.5)
