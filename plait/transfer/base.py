"""The interface of a connector: how a prompt that one engine computed gets into the arena of another.

A connector has two halves. The *scheduler's half* stands beside the scheduler: it reads what a client's
``kv_transfer_params`` ask for and writes those of the reply. The *worker's half* stands beside the arena (one
per rank, once there are several): it keeps leases, reads those of peers, and never waits. What is decided
between the two, leases, receptions, deadlines and quarantine, is the same for all connectors and is in
``plait.core.handover``.

Prompts are *pulled*: the decoder reads the prefiller's registered memory when it has room, and tells it when
it is done. So a prefiller needs to know nothing of decoders, and a prompt moves once::

    prefiller                                             decoder
       | offer: lease, units                                 |
       | reply to the client: kv_transfer_params ..........> | request with kv_transfer_params
       |                                                     | memory, and the steps before it over
       | <-------------- Hello (version, numerics, layout) --|     once per pair of engines
       |-- Welcome (the same, and how to read the arena) --->|
       | <-------------- Hold (lease) -----------------------|     kept for this reader, not beyond its life
       |-- Held (tokens' digest, units) -------------------->|
       |      ~~~~~~~~ bytes, by the Wire ~~~~~~~~~~~~~~~~~~>|
       | <-------------- Verify (lease) ---------------------|
       |-- Stands ------------------------------------------>|     else what was read means nothing
       | <-------------- Release (lease) --------------------|     when no request needs it any more

The conversation is in ``pull.py``; only the ``Wire`` knows what the bytes travel on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.core.handover import HandOverConfig
from plait.core.orders import Fetch, Offer, Report, Source
from plait.transfer.spans import Span


class TransferError(RuntimeError):
    """Memory cannot be exchanged, or could not; the message says with whom and why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request's ``kv_transfer_params`` ask for. Neither: nothing."""

    leaves: bool = False
    """compute the prompt, and keep it for another engine"""
    source: Source | None = None
    """the prompt was computed elsewhere"""


class SchedulerHalf(ABC):
    """What a connector has to say to clients."""

    @abstractmethod
    def read(self, params: Mapping[str, Any], num_prompt_tokens: int) -> Ask:
        """What the parameters of a request ask for.

        Raises:
            ValueError: they make no sense, or this engine does not serve them in its role; says why.
        """

    @abstractmethod
    def write(self, offer: Offer) -> dict[str, Any]:
        """The parameters of the reply to a prefilled request: its client hands them on to a decoder."""


class WorkerHalf(ABC):
    """Keeps leases and reads those of peers; see ``plait.core.orders.Mover`` for what each call promises."""

    @property
    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Host and port under which peers find it."""

    @abstractmethod
    def offer(self, offer: Offer) -> None: ...

    @abstractmethod
    def withdraw(self, lease_id: str) -> None: ...

    @abstractmethod
    def fetch(self, order: Fetch) -> None: ...

    @abstractmethod
    def keep(self, sources: Sequence[Source], seconds: float) -> None: ...

    @abstractmethod
    def abandon(self, fetch_id: int) -> None: ...

    @abstractmethod
    def release(self, source: Source) -> None: ...

    @abstractmethod
    def poll(self) -> list[Report]: ...

    @abstractmethod
    def fileno(self) -> int:
        """Of a descriptor that is readable while ``poll`` has something to tell."""

    @abstractmethod
    def close(self) -> None:
        """End all conversations. Waits until no fetch writes to the arena any more."""


class Wire(ABC):
    """Reads the memory of peers into the own arena."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a peer must know to read this arena; it travels in the handshake, as msgpack."""

    @abstractmethod
    def connect(self, description: Mapping[str, Any]) -> Any:
        """A handle on the arena of the peer that describes itself so.

        Raises:
            TransferError: it cannot be reached by this wire.
        """

    @abstractmethod
    async def read(self, peer: Any, spans: Sequence[Span], stop: Callable[[], bool]) -> None:
        """Read bytes of the peer's arena into the own one.

        It returns, or raises, only when nothing of it will be written any more, however long that takes: a
        read that was given up may still arrive where the network cannot recall it. ``stop`` says that nobody
        waits for it any more.

        Raises:
            TransferError: not everything was read.
        """

    @abstractmethod
    def disconnect(self, peer: Any) -> None:
        """The peer is gone: no read begins any more; one under way may still need the handle."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the wire holds. No read is under way."""


@dataclass(frozen=True, slots=True)
class Connector:
    """Both halves, and how patient they are."""

    engine_id: str
    scheduler: SchedulerHalf
    worker: WorkerHalf
    handover: HandOverConfig
