"""The decoder's side of a conversation: one prefiller that it asks."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from plait.transfer import words as w
from plait.transfer.base import TransferError, Wire
from plait.transfer.host import mismatch
from plait.transfer.words import PROTOCOL_VERSION, Self

LEASE_IS_OVER = "the prompt is not kept there any more: it was released, or nobody came for it in time"


class Peer:
    """A connection to a prefiller. Make one with ``await Peer.connect(...)``.

    Attributes:
        welcome: what the prefiller said of itself.
        handle: its memory, as the wire knows it.
        gone: the connection has ended.
    """

    def __init__(self, writer: asyncio.StreamWriter, welcome: w.Welcome, wire: Wire, handle: Any) -> None:
        self.welcome = welcome
        self.handle = handle
        self.gone = False
        self._wire = wire
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[w.Answer]] = {}
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, host: str, port: int, engine_id: str, me: Self, wire: Wire) -> Peer:
        """Connect and shake hands.

        Raises:
            TransferError: it is another engine, or one that cannot exchange memory with this one; says why.
            OSError: nobody is there.
        """
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(w.frame(w.Hello(PROTOCOL_VERSION, me.engine_id, me.identity, me.arena)))
            welcome = w.decode_answer(await w.read_frame(reader))
            if isinstance(welcome, w.Refusal):
                raise TransferError(f"it refuses to exchange memory: {welcome.reason}")
            if not isinstance(welcome, w.Welcome):
                raise TransferError("it does not speak plait's protocol")
            if welcome.engine_id != engine_id:
                raise TransferError("another engine is there now; the one that had the prompt has ended")
            theirs = Self(welcome.engine_id, welcome.identity, welcome.arena)
            if reason := mismatch(me, welcome.version, welcome.identity, theirs):
                raise TransferError(reason)
            peer = cls(writer, welcome, wire, wire.connect(welcome.wire))
        except msgspec.DecodeError as fault:
            writer.close()
            raise TransferError("it does not speak plait's protocol") from fault
        except BaseException:
            writer.close()
            raise
        peer._reader = asyncio.create_task(peer._read(reader))
        return peer

    async def hold(self, lease_id: str, seconds: float) -> w.Held:
        """Where a prompt lies; it is kept for ``seconds`` at least, while this connection lasts.

        Raises:
            TransferError: it is not kept (any more).
            ConnectionError: the peer has gone.
        """
        number = next(self._numbers)
        answer = await self._ask(number, w.Hold(number, lease_id, seconds))
        if not isinstance(answer, w.Held):
            raise TransferError(LEASE_IS_OVER)
        return answer

    async def verify(self, lease_id: str) -> None:
        """That the lease has stood until now, so that what was read is good. Raises as ``hold``."""
        number = next(self._numbers)
        if not isinstance(await self._ask(number, w.Verify(number, lease_id)), w.Stands):
            raise TransferError(LEASE_IS_OVER)

    def tell(self, word: w.Question) -> None:
        """Say something that is not answered."""
        self._writer.write(w.frame(word))

    def close(self) -> None:
        self._writer.close()
        if self._reader is not None:
            self._reader.cancel()
        self._end("the connection was given up")

    async def close_now(self) -> None:
        """Close, and wait until the peer can know."""
        self.close()
        await self._writer.wait_closed()

    async def _ask(self, number: int, word: w.Question) -> w.Answer:
        if self.gone:
            raise ConnectionError("the connection was closed")
        future: asyncio.Future[w.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.tell(word)
            return await future
        finally:
            del self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                word = w.decode_answer(await w.read_frame(reader))
                number = getattr(word, "number", None)
                future = self._waiting.get(number) if number is not None else None
                if future is not None and not future.done():
                    future.set_result(word)
        except (OSError, msgspec.DecodeError) as fault:
            self._writer.close()
            self._end(str(fault) or "the connection was closed")

    def _end(self, why: str) -> None:
        if self.gone:
            return
        self.gone = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(why))
        self._wire.disconnect(self.handle)
