"""Running the server with several API processes: this one starts them and the engine, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from plait.config import EngineArgs
from plait.server import tls
from plait.server.fleet import Fleet
from plait.server.listener import Signals, bind_several, url_of
from plait.server.run import unless_told, until_told, watched
from plait.server.settings import ServerSettings

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

_SPARE_SECONDS = 10.0
"""that processes may take beyond their own time to drain"""
_URGENT_SECONDS = 3.0


async def serve_several(
    args: EngineArgs,
    settings: ServerSettings,
    *,
    on_stage: Callable[[str], None] | None = None,
    on_ready: Callable[[AsyncEngine, str], None] | None = None,
) -> None:
    """As ``serve``, with ``settings.api_server_count`` processes that answer."""
    tls.uvicorn_settings(settings)  # a mistake there is told once
    socks = bind_several(settings.host, settings.port, settings.api_server_count)
    with contextlib.ExitStack() as stack, Signals() as signals:
        for sock in socks:
            stack.enter_context(contextlib.closing(sock))
        async with Fleet(args, settings, socks) as fleet:
            engine = await unless_told(signals, _load(args, settings, fleet, on_stage))
            if engine is None:
                return
            try:
                if on_ready is not None:
                    on_ready(engine, url_of(socks[0], settings.secure))
                async with watched(engine, settings) as ends:
                    await until_told(signals, fleet.failed, *ends)
                    await _drain(fleet, signals, settings.shutdown_timeout)
            finally:
                await engine.close(at_once=signals.urgent.is_set())


async def _load(
    args: EngineArgs, settings: ServerSettings, fleet: Fleet, on_stage: Callable[[str], None] | None
) -> AsyncEngine:
    """The engine, with the fleet in front of it. Its processes load first: their memory counts."""
    from plait.engine.async_engine import AsyncEngine
    from plait.engine.model_text import ModelText

    stage = on_stage or (lambda text: None)
    text = await ModelText.load(args, stage)
    stage("loading the API processes")
    await fleet.load(text.path)
    beside = [os.getpid(), *fleet.pids]
    engine = await AsyncEngine.start(args, text=text, on_stage=stage, beside=beside, logs=settings.logs)
    try:
        stage("opening the API processes")
        await fleet.open(engine)
    except BaseException:
        await engine.close(at_once=True)
        raise
    return engine


async def _drain(fleet: Fleet, signals: Signals, seconds: float) -> None:
    fleet.signal()
    drained = asyncio.ensure_future(fleet.drained())
    urgent = asyncio.ensure_future(signals.urgent.wait())
    await asyncio.wait(
        {drained, urgent}, timeout=seconds + _SPARE_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    urgent.cancel()
    if not drained.done():
        fleet.signal()
        await asyncio.wait({drained}, timeout=_URGENT_SECONDS)
    drained.cancel()
