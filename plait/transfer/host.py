"""The prefiller's side of a conversation: answers peers that read leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from plait.core.orders import Report, Returned
from plait.transfer import words as w
from plait.transfer.base import Wire
from plait.transfer.leases import LeaseTable
from plait.transfer.words import PROTOCOL_VERSION, Self


def mismatch(me: Self, version: int, identity: str, theirs: Self) -> str | None:
    """Why two engines must not exchange memory, as told to ``theirs``; None: they may."""
    if version != PROTOCOL_VERSION:
        return f"it speaks version {version} of the protocol, we {PROTOCOL_VERSION}: run the same plait"
    layout = me.arena.differs_from(theirs.arena)
    if identity != me.identity:
        other = f"it computes other bits than we: {identity!r} there, {me.identity!r} here"
        return other if layout is None else f"{layout}; {other}"
    return layout


class Host:
    """Answers connections, one task each. A reader's leases end with its connection."""

    def __init__(self, me: Self, wire: Wire, leases: LeaseTable, report: Callable[[Report], None]) -> None:
        self._me = me
        self._wire = wire
        self._leases = leases
        self._report = report

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held: set[str] = set()
        try:
            if self._greet(w.decode_question(await w.read_frame(reader)), writer):
                while True:
                    await writer.drain()
                    self._answer(w.decode_question(await w.read_frame(reader)), writer, held)
        except (OSError, msgspec.DecodeError, asyncio.CancelledError):
            pass  # it has gone, is no connector, or this engine ends
        finally:
            for lease_id in held:
                self._end(lease_id, "lost")
            writer.close()

    def _greet(self, word: w.Question, writer: asyncio.StreamWriter) -> bool:
        me = self._me
        if not isinstance(word, w.Hello):
            return False
        theirs = Self(word.engine_id, word.identity, word.arena)
        reason = mismatch(me, word.version, word.identity, theirs)
        if reason is not None:
            writer.write(w.frame(w.Refusal(reason)))
            return False
        wire = self._wire.describe()
        writer.write(w.frame(w.Welcome(PROTOCOL_VERSION, me.engine_id, me.identity, me.arena, wire)))
        return True

    def _answer(self, word: w.Question, writer: asyncio.StreamWriter, held: set[str]) -> None:
        match word:
            case w.Hold(number, lease_id, seconds):
                offer = self._leases.hold(lease_id, seconds)
                if offer is None:
                    writer.write(w.frame(w.Gone(number)))
                    return
                held.add(lease_id)
                pages, state = list(offer.pages), offer.state
                writer.write(w.frame(w.Held(number, offer.num_tokens, offer.digest, pages, state)))
            case w.Verify(number, lease_id):
                stands = self._leases.stands(lease_id)
                writer.write(w.frame(w.Stands(number) if stands else w.Gone(number)))
            case w.Release(lease_id):
                held.discard(lease_id)
                self._end(lease_id, "released")

    def _end(self, lease_id: str, why: str) -> None:
        if self._leases.end(lease_id):
            self._report(Returned(lease_id, why))
