"""Several API processes in front of one engine: started, watched, and ended together.

Each has a socket of its own on the one port, which this process keeps open too: connections to one that died
wait for the one that takes its place. Requests of one that died end in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plait.config import EngineArgs
from plait.server.member import Load, News, Open, Order
from plait.server.settings import ServerSettings

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)

_END_SECONDS = 8.0
"""that processes may take to end once their lifelines are cut"""
_FAILURES = 3
"""processes that end in a row, none of which had begun to serve, after which no more are started"""
_RESTART_SECONDS = 0.5


class Fleet:
    """The API processes of one server. Use it as an asynchronous context: at its end all have ended.

    Args:
        socks: one for each, on one port.
    """

    def __init__(self, args: EngineArgs, settings: ServerSettings, socks: list[socket.socket]) -> None:
        self._args = args
        self._settings = settings
        self._socks = socks
        self._folder = tempfile.mkdtemp(prefix="plait-api-")
        self._model = ""
        self._engine: AsyncEngine | None = None
        self._names = itertools.count()
        self._members: list[_Member] = []
        self._ending = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """raises once the processes cannot be kept up"""

    async def __aenter__(self) -> Fleet:
        for index, sock in enumerate(self._socks):
            self._members.append(_Member(self, index, sock))
        try:
            await asyncio.gather(*(member.start() for member in self._members))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*(member.end() for member in self._members))
        shutil.rmtree(self._folder, ignore_errors=True)
        self.failed.cancel()

    @property
    def serves(self) -> bool:
        return self._engine is not None

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    async def load(self, model: Path) -> None:
        """Have every process load what it needs of the model.

        Raises:
            ValueError: one cannot.
        """
        self._model = str(model)
        await self._all(lambda member: member.load(self._model), "loaded")

    async def open(self, engine: AsyncEngine) -> None:
        """Have them all serve the engine, and keep so many of them alive."""
        self._engine = engine
        await self._all(lambda member: member.open(engine), "opened")

    async def _all(self, tell: Callable[[_Member], None], state: str) -> None:
        for member in self._members:
            tell(member)
        await asyncio.gather(*(member.reach(state) for member in self._members))

    def signal(self) -> None:
        """Have them all drain; a second time: at once."""
        self._ending = True
        for member in self._members:
            member.signal()

    async def drained(self) -> None:
        """Wait until all have given their last answers, or have died."""
        await asyncio.gather(*(member.reach("drained") for member in self._members), return_exceptions=True)

    # -- what members ask --------------------------------------------------------------------

    def order(self, index: int, sock: socket.socket) -> Order:
        name = f"api-{index}.{next(self._names)}"
        args, settings, count = self._args, self._settings, len(self._socks)
        return Order(name, index, count, self._folder, sock.fileno(), args, settings, not self.serves)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(p for p in sys.path if p)
        return {**os.environ, "PYTHONPATH": path, "PROMETHEUS_MULTIPROC_DIR": self._folder}

    async def replace(self, member: _Member) -> None:
        """A process has died: forget its requests, and start another."""
        if self._ending or self._engine is None:
            return
        log.error("API process %d (%s) died; its requests end, another is started", member.pid, member.name)
        await self._engine.forget(member.name)
        if member.failures >= _FAILURES:
            if not self.failed.done():
                self.failed.set_exception(ValueError("API processes end as soon as they are started"))
            return
        await asyncio.sleep(_RESTART_SECONDS * member.failures)
        if not self._ending:
            await member.start()
            member.load(self._model)
            member.open(self._engine)
        if self._ending:
            await member.end()


class _Member:
    """One place in the fleet, and the process that has it."""

    def __init__(self, fleet: Fleet, index: int, sock: socket.socket) -> None:
        self._fleet = fleet
        self._index = index
        self._sock = sock
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._news: dict[str, asyncio.Future[None]] = {}
        self.name = ""
        self.failures = 0

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        order = self._fleet.order(self._index, self._sock)
        self.name = order.name
        self._news = {}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "plait.server.member",
            stdin=PIPE, stdout=PIPE, pass_fds=[self._sock.fileno()],
            start_new_session=True, env=self._fleet.environment(),
        )  # fmt: skip
        self._say(order)
        self._watching = asyncio.create_task(self._watch(self._process))

    def load(self, model: str) -> None:
        self._say(Load(model))

    def open(self, engine: AsyncEngine) -> None:
        self._say(Open(engine.address, engine.ready))

    def _say(self, order: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died, which is noticed elsewhere
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def signal(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    async def reach(self, state: str) -> None:
        """Wait until the process has reached a state. Raises ValueError if it will not."""
        await self._future(state)

    def _future(self, state: str) -> asyncio.Future[None]:
        if state not in self._news:
            self._news[state] = asyncio.get_running_loop().create_future()
            if self._process is None or self._process.returncode is not None:
                self._news[state].set_exception(ValueError(self._died()))
        return self._news[state]

    async def _watch(self, process: Process) -> None:
        """Take in what the process tells, until it ends."""
        assert process.stdout is not None
        async for line in process.stdout:
            news = msgspec.json.decode(line, type=News)
            if news.state == "failed":
                self._fail(news.why)
                if self._fleet.serves:
                    process.kill()  # to be replaced
            elif not (future := self._future(news.state)).done():
                future.set_result(None)
        await process.wait()
        opened = self._future("opened")
        self.failures = 0 if opened.done() and opened.exception() is None else self.failures + 1
        self._fail(self._died())
        await self._fleet.replace(self)

    def _fail(self, why: str) -> None:
        for state in ("loaded", "opened", "drained"):
            future = self._future(state)
            if not future.done():
                future.set_exception(ValueError(why))
            future.exception()  # it may be that nobody waits

    def _died(self) -> str:
        code = None if self._process is None else self._process.returncode
        return f"API process {self.name} ended with status {code}; the lines above may say why"

    async def end(self) -> None:
        """Cut the lifeline, and wait until the process has ended."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
