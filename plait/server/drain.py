"""The last answers of a process."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from plait.server.gate import Gate
from plait.server.listener import Signals

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 5.0
"""that answers may take to end once the engine has failed them: a client that does not read takes for ever"""
_URGENT_SECONDS = 1.0


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
        words = _URGENT_SECONDS if signals.urgent.is_set() else _LAST_WORDS_SECONDS
        await asyncio.wait({emptied}, timeout=words)
    emptied.cancel()
