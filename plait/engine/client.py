"""A client of the engine process: starts it, talks to it, notices when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from plait.config import ConfigError, EngineArgs
from plait.core.tree import Branch
from plait.engine import messages as m
from plait.engine.outputs import EngineDeadError, NobodyReads, RequestFailed, RequestRefused
from plait.engine.stats import EngineStats
from plait.logs import LogSettings

STOP_SECONDS = 10.0
"""How long the process may take to end by itself before it is killed."""

DEFAULT_LOGS = LogSettings()

Event = m.Output | Exception


class Events(asyncio.Queue[Event]):
    """What happens to the answers of one caller, until it looks.

    ``most``: events that may lie unread; one more ends the request it is about. None: no bound.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most
        self._wanted = False

    async def get(self) -> Event:
        self._wanted = True
        try:
            return await super().get()
        finally:
            self._wanted = False

    @property
    def overrun(self) -> bool:
        """Too much lies here, and not because this process is late: its caller has not asked for more."""
        return self._most is not None and not self._wanted and self.qsize() >= self._most


class EngineClient:
    """Owns one engine process. All methods belong to the event loop that started it.

    Requests are followed through queues: each event is an ``Output``, or the exception that ended the
    request (``RequestRefused``, ``RequestFailed``, ``EngineDeadError``).

    Args:
        args: the engine's settings.
        beside: ids of processes that ``memory_limit`` bounds together with the engine's.
        logs: how the engine process logs.
        name: of a client beside the first, unlike any other's; it begins the ids of its requests.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        beside: Sequence[int] = (),
        logs: LogSettings = DEFAULT_LOGS,
        name: str = "",
    ) -> None:
        self.args = args
        self.name = name
        self.address = ""
        self._logs = replace(logs, process="engine")
        self._beside = list(beside)
        self.dead: EngineDeadError | None = None
        self.ready: m.Ready | None = None
        self._queues: dict[str, Events] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        """by number: questions that the engine has not answered yet"""
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._context: zmq.asyncio.Context | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closing = False
        self._process_end: int | None = None
        """descriptor of a process that another client has started"""

    # -- start and end ----------------------------------------------------------------------

    async def start(self, on_stage: Callable[[str], None] | None = None) -> m.Ready:
        """Start the process and wait until the model is loaded.

        Raises:
            ConfigError: the settings or the model cannot be served; says why.
            EngineDeadError: the process ended without a word.
        """
        self._folder = tempfile.mkdtemp(prefix="plait-")
        self.address = f"ipc://{self._folder}/engine"
        self._open_socket()
        try:
            self._spawn(self.address)
            self._socket.connect(self.address)
            await self._socket.send(b"")  # so that the engine knows whom to tell
            return await self._await_ready(on_stage or (lambda text: None))
        except BaseException:
            await self.close()
            raise

    async def attach(self, address: str, ready: m.Ready) -> None:
        """Be one more client of a process that another client has started."""
        self.address, self.ready = address, ready
        self._open_socket()
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self._socket.connect(address)
        try:
            descriptor = os.pidfd_open(ready.pid)
        except ProcessLookupError:
            self._on_exit(None)
        else:
            self._process_end = descriptor  # readable once the process has ended
            self._loop.add_reader(descriptor, self._on_exit, None)
        self._reader = asyncio.create_task(self._read())

    async def forget(self, name: str) -> None:
        """Tell the engine that the client of that name has died: its requests end."""
        if self.dead is None:
            await self._send(m.ClientGone(name))

    def _open_socket(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # nothing is dropped, and sending never blocks
        self._socket.setsockopt(zmq.LINGER, 0)
        self._died = asyncio.Event()

    def _spawn(self, address: str) -> None:
        args, logs = msgspec.to_builtins(self.args), msgspec.to_builtins(self._logs)
        order = {"address": address, "args": args, "beside": self._beside, "logs": logs}
        line = msgspec.json.encode(order) + b"\n"
        # The engine gets a session of its own: Ctrl-C in a terminal is for the client to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plait.engine.process"],
            stdin=subprocess.PIPE,
            stdout=2,  # the client's standard output is its own
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def _watch(self) -> None:
        """In a thread of its own: tell the loop when the process has ended."""
        assert self._process is not None
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._on_exit, code)

    async def _await_ready(self, on_stage: Callable[[str], None]) -> m.Ready:
        died = asyncio.create_task(self._died.wait())
        try:
            while True:
                receive = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({receive, died}, return_when=asyncio.FIRST_COMPLETED)
                if not receive.done():
                    receive.cancel()
                    assert self.dead is not None
                    raise self.dead
                message = m.decode_from_engine(receive.result())
                match message:
                    case m.Stage(text):
                        on_stage(text)
                    case m.StartFailed(reason):
                        raise ConfigError(reason)
                    case m.Ready():
                        self.ready = message
                        self._reader = asyncio.create_task(self._read())
                        return message
        finally:
            died.cancel()

    def _on_exit(self, code: int | None) -> None:
        self._unwatch()
        if self._closing:
            why = "the engine was closed"
        elif code is None:
            why = "the engine process has ended; its requests are lost, start it again"
        else:
            ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            why = f"the engine process {ended}; its requests are lost, start it again"
        self._died.set()
        self.fail(why)

    def _unwatch(self) -> None:
        if self._process_end is not None:
            self._loop.remove_reader(self._process_end)
            os.close(self._process_end)
            self._process_end = None

    def fail(self, why: str) -> None:
        """Take no more requests; every one that waits gets an error, now."""
        if self.dead is None:
            self.dead = EngineDeadError(why)
        for queue in self._queues.values():
            queue.put_nowait(EngineDeadError(str(self.dead)))
        self._queues.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(self.dead)))
        self._asked.clear()

    async def close(self, at_once: bool = False) -> None:
        """End the process; requests that still wait get an error. Safe to call twice.

        ``at_once``: kill it.
        """
        if self._context is None:
            return
        self._closing = True
        self.fail("the engine was closed")
        self._unwatch()
        process = self._process
        if process is not None and process.poll() is None:
            if at_once:
                process.kill()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._send(m.Stop()), 1)
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()  # the lifeline: it ends even where it reads no messages
            await self._end(process)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._socket.close(linger=0)
        self._context.term()
        self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        # No executor here: at the interpreter's end there is none any more.
        try:
            await asyncio.wait_for(self._died.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await self._died.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    # -- talking ----------------------------------------------------------------------------

    async def _send(self, message: m.Message) -> None:
        await self._socket.send(m.encode(message))

    async def _read(self) -> None:
        while True:
            message = m.decode_from_engine(await self._socket.recv())
            match message:
                case m.Outputs(entries):
                    for output in entries:
                        self._post(output.request_id, output, over=output.finish_reason is not None)
                case m.RequestFailed(request_id, reason, refused):
                    error = RequestRefused(reason) if refused else RequestFailed(reason)
                    self._post(request_id, error, over=True)
                case m.Stats(number, answer) | m.Tree(number, answer):
                    future = self._asked.pop(number, None)
                    if future is not None and not future.done():
                        future.set_result(answer)
                case m.Crashed(reason):
                    self.fail(f"the engine process crashed: {reason}")

    def _post(self, request_id: str, event: Event, over: bool) -> None:
        queue = self._queues.pop(request_id, None) if over else self._queues.get(request_id)
        if queue is None:
            return
        if queue.overrun and not over:
            self.cancel([request_id])
            event = NobodyReads(f"{queue.qsize()} parts of the answer were not taken; the request was ended")
        queue.put_nowait(event)

    def check(self) -> None:
        """Raise EngineDeadError if the process has ended."""
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))

    async def add(self, message: m.Add, queue: Events) -> None:
        """Send a request; its events go to ``queue``."""
        self.check()
        self._queues[message.request_id] = queue
        await self._send(message)

    def cancel(self, request_ids: list[str]) -> None:
        """Forget requests; nothing more comes to their queues."""
        live = [r for r in request_ids if self._queues.pop(r, None) is not None]
        if live and self.dead is None and self._context is not None:
            self._socket.send(m.encode(m.Cancel(live)))

    def abort(self, request_ids: list[str]) -> None:
        """End requests; whoever follows them gets a last output with finish reason "abort"."""
        for request_id in request_ids:
            queue = self._queues.get(request_id)
            if queue is not None:
                self.cancel([request_id])
                queue.put_nowait(m.Output(request_id, (), (), None, "abort", None, 0))

    async def stats(self) -> EngineStats:
        number, answer = self._ask()
        await self._send(m.AskStats(number))
        stats: EngineStats = await answer
        return stats

    async def prefix_tree(self, most: int) -> list[Branch]:
        number, answer = self._ask()
        await self._send(m.AskTree(number, most))
        branches: list[Branch] = await answer
        return branches

    def _ask(self) -> tuple[int, asyncio.Future[Any]]:
        self.check()
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        return number, self._asked[number]

    async def reset_prefix_cache(self) -> None:
        self.check()
        await self._send(m.ResetPrefixCache())
