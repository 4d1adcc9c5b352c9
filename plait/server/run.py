"""Running the server: load the model, serve until told to stop, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from plait.config import EngineArgs
from plait.engine.outputs import EngineDeadError
from plait.server.app import create_app
from plait.server.front import front
from plait.server.gate import Gate
from plait.server.listener import Listener, Signals, bind, url_of
from plait.server.settings import ServerSettings
from plait.server.stats_line import log_stats

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 5.0
"""that answers may take to end once the engine has failed them: a client that does not read takes for ever"""


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
    gate = Gate(settings.root_path)
    sock = bind(settings.host, settings.port)
    with contextlib.closing(sock), Signals() as signals:
        listener = Listener(front(gate, settings), sock, settings)
        await listener.start()
        try:
            engine = await _load(args, settings, signals, on_stage)
            if engine is None:
                return
            try:
                gate.open(create_app(engine, settings))
                if on_ready is not None:
                    on_ready(engine, url_of(sock, settings.secure))
                await _until_told(engine, settings, signals)
                await drain(gate, engine, signals, settings.shutdown_timeout)
            finally:
                await engine.close(at_once=signals.urgent.is_set())
        finally:
            await listener.close(at_once=signals.asked.is_set() and gate.inside > 0)


async def _load(
    args: EngineArgs, settings: ServerSettings, signals: Signals, on_stage: Callable[[str], None] | None
) -> AsyncEngine | None:
    """The engine; None if a signal came first."""
    from plait.engine.async_engine import AsyncEngine

    loading = asyncio.ensure_future(
        AsyncEngine.start(args, on_stage=on_stage, limits_both=True, logs=settings.logs)
    )
    told = asyncio.ensure_future(signals.asked.wait())
    try:
        await asyncio.wait({loading, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.wait({loading})  # it ends the engine process, if there is one
    return None if loading.cancelled() else loading.result()


async def _until_told(engine: AsyncEngine, settings: ServerSettings, signals: Signals) -> None:
    watching = [asyncio.ensure_future(_report_death(engine))]
    if not settings.disable_log_stats:
        watching.append(asyncio.ensure_future(log_stats(engine.stats, settings.log_stats_interval)))
    try:
        await signals.asked.wait()
    finally:
        for task in watching:
            task.cancel()


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


async def drain(gate: Gate, engine: AsyncEngine, signals: Signals, seconds: float) -> None:
    """Take no new requests and wait for the answers under way. When the time is up, or at a second signal,
    those that still run get an error that says so."""
    gate.drain()
    if gate.inside:
        log.info("shutting down: %d requests are being answered", gate.inside)
    emptied = asyncio.ensure_future(gate.emptied())
    urgent = asyncio.ensure_future(signals.urgent.wait())
    await asyncio.wait({emptied, urgent}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    urgent.cancel()
    if not emptied.done():
        log.warning("%d requests did not end in time and get an error", gate.inside)
        engine.fail("the server is shutting down; send the request to another, or again later")
        words = _LAST_WORDS_SECONDS / 5 if signals.urgent.is_set() else _LAST_WORDS_SECONDS
        await asyncio.wait({emptied}, timeout=words)
    emptied.cancel()
