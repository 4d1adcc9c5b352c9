"""One of several API processes of a server: ``python -m plait.server.member``.

Its orders come as lines of JSON on standard input: first ``Order``, then ``Load`` with the model's place,
then ``Open`` once the engine has loaded it. The input stays open as a lifeline: when it closes, this process
ends. What it has to tell goes out on standard output, as lines of JSON too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from plait.config import EngineArgs
from plait.engine import messages as m
from plait.engine.async_engine import AsyncEngine
from plait.engine.model_text import ModelText
from plait.logs import configure
from plait.server.app import create_app
from plait.server.drain import drain
from plait.server.front import front
from plait.server.gate import Gate
from plait.server.listener import Listener, Signals
from plait.server.settings import ServerSettings
from plait.server.shared import Shared


class Order(msgspec.Struct, tag=True):
    """What this process is."""

    name: str
    """unlike that of any other process of the server, at any time"""
    index: int
    count: int
    folder: str
    descriptor: int
    """of the socket to serve on"""
    args: EngineArgs
    settings: ServerSettings
    early: bool
    """answer before the engine is there, with a 503; else connections wait, since other processes serve"""


class Load(msgspec.Struct, tag=True):
    """The model has been found."""

    model: str


class Open(msgspec.Struct, tag=True):
    """The engine takes requests."""

    address: str
    ready: m.Ready


class News(msgspec.Struct):
    """What this process tells: it has reached a state, or cannot, and why."""

    state: str
    """loaded, opened, drained or failed"""
    why: str = ""


_decode = msgspec.json.Decoder(Order | Load | Open).decode


def tell(state: str, why: str = "") -> None:
    with contextlib.suppress(BrokenPipeError):  # the lifeline is cut as well
        os.write(1, msgspec.json.encode(News(state, why)) + b"\n")


class Orders:
    """Lines of standard input as they come."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.cut = asyncio.Event()
        """the input has closed: nobody is there to give orders"""

    async def read(self) -> None:
        reader = asyncio.StreamReader(limit=2**26)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0)
        )
        while line := await reader.readline():
            self._lines.put_nowait(line)
        self.cut.set()

    async def next(self) -> Any:
        return _decode(await self._lines.get())


class Member:
    """An API process, from its order to its end."""

    def __init__(self, order: Order, orders: Orders, signals: Signals) -> None:
        self._order = order
        self._orders = orders
        self._signals = signals
        self._gate = Gate(order.settings.root_path)
        self._engine: AsyncEngine | None = None

    async def live(self) -> None:
        """Serve until the lifeline is cut."""
        settings = self._order.settings
        with socket.socket(fileno=self._order.descriptor) as sock:
            listener = Listener(front(self._gate, settings), sock, settings)
            if self._order.early:
                await listener.start()
            work = asyncio.ensure_future(self._work(listener))
            cut = asyncio.ensure_future(self._orders.cut.wait())
            try:
                await asyncio.wait({work, cut}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                await cut
            finally:
                work.cancel()
                await asyncio.wait({work})
                if self._engine is not None:
                    await self._engine.close()
                await listener.close(at_once=True)

    async def _work(self, listener: Listener) -> None:
        order = self._order
        load: Load = await self._orders.next()
        try:
            text = await ModelText.load(replace(order.args, model=load.model))
        except (ValueError, OSError) as fault:
            tell("failed", str(fault))
            return
        tell("loaded")
        opening: Open = await self._orders.next()
        self._engine = await AsyncEngine.attach(
            order.args,
            text,
            opening.address,
            opening.ready,
            name=order.name,
            number=order.index,
            of=order.count,
        )
        shared = Shared(order.index, order.count, Path(order.folder))
        app = create_app(self._engine, order.settings, shared)
        self._gate.open(app)
        if not order.early:
            await listener.start()
        tell("opened")
        await self._signals.asked.wait()
        await drain(self._gate, self._engine, self._signals, order.settings.shutdown_timeout)
        if not self._signals.urgent.is_set():
            await app.state.service.close()
        tell("drained")


async def main() -> None:
    orders = Orders()
    reading = asyncio.ensure_future(orders.read())
    with Signals() as signals:
        first = asyncio.ensure_future(orders.next())
        cut = asyncio.ensure_future(orders.cut.wait())
        await asyncio.wait({first, cut}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            order: Order = first.result()
            configure(replace(order.settings.logs, process=order.name))
            await Member(order, orders, signals).live()
    reading.cancel()


if __name__ == "__main__":
    from plait.server.run import run

    run(main())
    sys.exit(0)
