"""The worker's half of connectors that pull: the conversation of ``base.py`` in a thread of its own.

The engine's thread gives orders and polls for reports; everything else happens on the thread's event loop.
Every fetch is one task there. It waits for its peer as long as its order says, and is then over. Once bytes
travel, only the wire knows when it is over, and the task waits for that, whoever still waits for the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from plait.core.orders import Arrived, Broken, Fetch, Offer, Report, Returned, Source
from plait.transfer import words as w
from plait.transfer.base import TransferError, Wire, WorkerHalf
from plait.transfer.host import Host
from plait.transfer.leases import LeaseTable
from plait.transfer.peer import Peer
from plait.transfer.spans import ArenaMap, Span, readers, span
from plait.transfer.words import Self

T = TypeVar("T")
log = logging.getLogger(__name__)

VERIFY_SECONDS = 5.0
"""A prefiller may take at least so long to confirm what was read, however late it is."""
RELEASE_SECONDS = 5.0
"""How long to try to tell a prefiller that a lease is not needed; after that it expires by itself."""


class PullWorker(WorkerHalf):
    """Serves leases of its own arena and reads those of peers.

    Args:
        me: what peers are told of this engine.
        wire: moves the bytes.
        host: address to listen on, and that peers are told.
        port: 0 takes any free one.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, me: Self, wire: Wire, host: str = "127.0.0.1", port: int = 0) -> None:
        self.me = me
        self.wire = wire
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._reports: deque[Report] = deque()
        self._readable, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._readable, False)
        self._loop = asyncio.new_event_loop()
        self._leases = LeaseTable(self._loop.time)
        self._host = Host(me, wire, self._leases, self._report)
        self._expiry: asyncio.TimerHandle | None = None
        self._fetches: dict[int, asyncio.Task[Report]] = {}
        self._abandoned: set[int] = set()
        self._peers: dict[tuple[str, int, str], asyncio.Task[Peer]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reading: set[asyncio.Task[Any] | None] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="transfer", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    # -- the engine's thread ----------------------------------------------------------------

    def offer(self, offer: Offer) -> None:
        self._leases.add(offer)
        self._later(self._expire)

    def withdraw(self, lease_id: str) -> None:
        self._leases.end(lease_id)

    def fetch(self, order: Fetch) -> None:
        self._later(self._begin, order)

    def keep(self, sources: Sequence[Source], seconds: float) -> None:
        self._later(lambda: [self._spawn(self._keep(source, seconds)) for source in sources])

    def abandon(self, fetch_id: int) -> None:
        self._later(self._abandon, fetch_id)

    def release(self, source: Source) -> None:
        self._later(lambda: self._spawn(self._release(source)))

    def poll(self) -> list[Report]:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._readable, 4096):
                pass
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def fileno(self) -> int:
        return self._readable

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._later(self._closing.set)
        self._thread.join()
        self.wire.close()
        for descriptor in (self._readable, self._wake):
            os.close(descriptor)

    def _later(self, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    # -- the loop's thread ------------------------------------------------------------------

    def _run(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main(listener))
        self._loop.close()

    async def _main(self, listener: socket.socket) -> None:
        """Listen until the engine closes. Then end everything, but wait for reads: they write to memory."""
        server = await asyncio.start_server(self._host.serve, sock=listener)
        await self._closing.wait()
        server.close()
        peers = [
            t.result() for t in self._peers.values() if t.done() and not (t.cancelled() or t.exception())
        ]
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others - self._reading:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(peer.close_now() for peer in peers), return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself would let go of it
        task.add_done_callback(self._tasks.discard)
        return task

    def _report(self, report: Report) -> None:
        self._reports.append(report)
        with contextlib.suppress(BlockingIOError):  # full: then it is readable anyway
            os.write(self._wake, b"\0")

    def _expire(self) -> None:
        """End leases whose time is up, and come back when the next one's is."""
        over, due = self._leases.expire()
        for lease_id in over:
            self._report(Returned(lease_id, "expired"))
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None if due is None else self._loop.call_later(due, self._expire)

    # -- fetching ---------------------------------------------------------------------------

    def _begin(self, order: Fetch) -> None:
        task = self._spawn(self._fetch(order))
        self._fetches[order.fetch_id] = task
        task.add_done_callback(lambda task: self._end_fetch(order.fetch_id, task))

    def _abandon(self, fetch_id: int) -> None:
        task = self._fetches.get(fetch_id)
        if task is None:
            return  # it is over, and has said so
        self._abandoned.add(fetch_id)
        if task not in self._reading:
            task.cancel()

    def _end_fetch(self, fetch_id: int, task: asyncio.Task[Report]) -> None:
        """Report a fetch that is over, however it ended; one that was given up may not even have begun."""
        del self._fetches[fetch_id]
        self._abandoned.discard(fetch_id)
        fault = None if task.cancelled() else task.exception()
        if task.cancelled():
            report: Report = Broken(fetch_id, "nobody waits for it any more")
        elif fault is not None:
            log.error("fetch %d failed", fetch_id, exc_info=fault)
            report = Broken(fetch_id, f"{type(fault).__name__}: {fault}")
        else:
            report = task.result()
        self._report(report)

    async def _fetch(self, order: Fetch) -> Report:
        """One fetch, from its order to its end."""
        source, ends = order.source, self._loop.time() + order.seconds
        try:
            async with asyncio.timeout_at(ends):
                peer = await self._peer(source)
                held = await peer.hold(source.lease_id, order.seconds)
            spans = _spans(self.me.arena, peer.welcome.arena, order, held)
            await self._read(peer, spans, order.fetch_id)
            if self._closing.is_set() or order.fetch_id in self._abandoned:
                raise TransferError("nobody waits for it any more")
            async with asyncio.timeout_at(max(ends, self._loop.time() + VERIFY_SECONDS)):
                await peer.verify(source.lease_id)
        except TimeoutError:
            self._drop_peer(source)  # it may be there again later: by a new connection
            reason = f"{source.host}:{source.port} has not answered within {order.seconds:.3g} s"
            return Broken(order.fetch_id, reason)
        except (TransferError, OSError) as fault:
            return Broken(order.fetch_id, f"{source.host}:{source.port}: {fault}")
        return Arrived(order.fetch_id)

    async def _read(self, peer: Peer, spans: list[Span], fetch_id: int) -> None:
        if peer.gone:  # another fetch gave it up between this one's question and now
            raise TransferError("the connection was closed")
        task = asyncio.current_task()
        self._reading.add(task)
        try:
            await self.wire.read(
                peer.handle, spans, lambda: self._closing.is_set() or fetch_id in self._abandoned
            )
        finally:
            self._reading.discard(task)

    async def _keep(self, source: Source, seconds: float) -> None:
        with contextlib.suppress(TransferError, OSError, TimeoutError):  # the fetch will tell
            async with asyncio.timeout(seconds):
                await (await self._peer(source)).hold(source.lease_id, seconds)

    async def _release(self, source: Source) -> None:
        with contextlib.suppress(TransferError, OSError, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                peer = await self._peer(source)
                peer.tell(w.Release(source.lease_id))

    async def _peer(self, source: Source) -> Peer:
        """The connection to a prefiller: the one that there is, or a new one.

        Raises:
            TransferError, OSError: there is none to be had.
        """
        key = (source.host, source.port, source.engine_id)
        task = self._peers.get(key)
        if task is None:
            task = self._loop.create_task(Peer.connect(*key, self.me, self.wire))
            self._peers[key] = task
        try:
            peer = await asyncio.shield(task)  # others may wait for it longer than this one does
        except (TransferError, OSError):
            self._forget_peer(key, task)
            raise
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise TransferError("it does not answer") from None
        if peer.gone:
            self._forget_peer(key, task)
            return await self._peer(source)
        return peer

    def _drop_peer(self, source: Source) -> None:
        key = (source.host, source.port, source.engine_id)
        task = self._peers.get(key)
        if task is not None:
            self._forget_peer(key, task)

    def _forget_peer(self, key: tuple[str, int, str], task: asyncio.Task[Peer]) -> None:
        if self._peers.get(key) is task:
            del self._peers[key]
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            task.result().close()


def _spans(ours: ArenaMap, theirs: ArenaMap, order: Fetch, held: w.Held) -> list[Span]:
    """What to read. The units are those that the prefiller names, whatever the client said.

    Raises:
        TransferError: it keeps another prompt, or speaks of memory that it does not have.
    """
    if held.digest != order.digest or held.num_tokens != order.source.num_tokens:
        raise TransferError(
            "it keeps another prompt under this lease: do both engines have the same tokenizer and chat "
            "template, and did both get the same cache_salt?"
        )
    wanted = [
        (ours.pages, theirs.pages, local, remote)
        for local, remote in zip(order.pages, held.pages[order.first_page :], strict=True)
    ]
    if order.state is not None and ours.states is not None and theirs.states is not None:
        if held.state is None:
            raise TransferError("it keeps no recurrent state for this prompt")
        wanted.append((ours.states, theirs.states, order.state, held.state))
    spans = [
        span(mine, its, parts, local, remote)
        for mine, its, local, remote in wanted
        for _, parts in readers(mine, [its])
    ]
    if any(s.remote < 0 or s.remote + s.length > theirs.arena_bytes for s in spans):
        raise TransferError(f"it names memory outside its arena of {theirs.arena_bytes:,} bytes")
    return spans
