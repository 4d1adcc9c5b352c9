"""What two worker's halves say to each other: msgpack, each message behind its length.

The decoder asks, the prefiller answers; ``number`` joins an answer to its question.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.transfer.spans import ArenaMap

PROTOCOL_VERSION = 1
"""Engines that differ in it do not exchange memory."""
MOST_BYTES = 64 * 2**20
"""Longest message; the page numbers of the longest prompt are far below."""


@dataclass(frozen=True, slots=True)
class Self:
    """What an engine says of itself.

    Args:
        engine_id: its name among peers.
        identity: numerics id and weights: engines that differ in it would not give the same bits.
        arena: how its memory is laid out.
    """

    engine_id: str
    identity: str
    arena: ArenaMap


class Word(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the tag is the class's name."""


class Hello(Word):
    """The first message: who asks."""

    version: int
    engine_id: str
    identity: str
    arena: ArenaMap


class Welcome(Word):
    """The answer: who is asked, and how its arena is read."""

    version: int
    engine_id: str
    identity: str
    arena: ArenaMap
    wire: dict[str, Any]


class Refusal(Word):
    """Instead of ``Welcome``: nothing will be exchanged."""

    reason: str


class Hold(Word):
    """Keep a lease while I read it, for so many seconds, and not beyond this connection."""

    number: int
    lease_id: str
    seconds: float


class Held(Word):
    """Where the prompt lies."""

    number: int
    num_tokens: int
    digest: bytes
    pages: list[int]
    state: int | None


class Verify(Word):
    """I have read it: does it still stand?"""

    number: int
    lease_id: str


class Stands(Word):
    number: int


class Gone(Word):
    """The lease is over: what was read means nothing."""

    number: int


class Release(Word):
    """Nobody here needs the lease any more. Not answered."""

    lease_id: str


Question = Hello | Hold | Verify | Release
Answer = Welcome | Refusal | Held | Stands | Gone

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(word: Word) -> bytes:
    body = _encode(word)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next message.

    Raises:
        ConnectionError: the other side has gone, or speaks something else.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MOST_BYTES:
            raise ConnectionError(f"a message of {length:,} bytes: that is no connector of plait")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as end:
        raise ConnectionError("the connection was closed") from end
