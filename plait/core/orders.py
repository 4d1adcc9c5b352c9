"""What the scheduler's half of a hand-over and its worker's half say to each other. Plain data, no bytes.

A *lease* is a prefilled prompt that the prefiller keeps for a decoder. A *fetch* is one decoder's reading
of it. The scheduler's half gives orders by calling the methods of a ``Mover``, none of which waits; what
comes of them it learns from ``Mover.poll``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Source:
    """Where the first ``num_tokens`` tokens of a prompt were computed, as the decoder was told by its client.

    ``num_tokens`` is 0 where the prompt was too short to leave anything: then there is no lease.
    """

    engine_id: str
    host: str
    port: int
    lease_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A lease: which units of the prefiller's arena hold the prompt.

    ``digest`` names the tokens, the salt and everything that changes bits, so that nobody takes the memory of
    another prompt for that of its own.
    """

    lease_id: str
    num_tokens: int
    digest: bytes
    pages: tuple[int, ...]
    """of all positions below ``num_tokens``, in order"""
    state: int | None
    """the recurrent state after ``num_tokens`` tokens"""
    seconds: float
    """how long it is kept for somebody to come and read"""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read a lease into units of the own arena: pages from number ``first_page`` on, and the state."""

    fetch_id: int
    source: Source
    digest: bytes
    first_page: int
    pages: tuple[int, ...]
    state: int | None
    seconds: float
    """after this nobody waits for it any more"""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The fetch is over: all of it was read while the lease stood."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The fetch is over and has failed: nothing will be written any more, what was written means nothing."""

    fetch_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    """The lease is over: whoever still reads it will be told that what he read means nothing."""

    lease_id: str
    reason: str
    """"released", "expired" or "lost" (its reader went away)"""


Report = Arrived | Broken | Returned


class Mover(Protocol):
    """The worker's half, as the scheduler's half sees it. No method waits."""

    def offer(self, offer: Offer) -> None:
        """From now on a decoder may read these units. They keep their content until ``Returned`` comes."""

    def withdraw(self, lease_id: str) -> None:
        """End a lease now. No ``Returned`` follows."""

    def fetch(self, order: Fetch) -> None:
        """Begin to read. Exactly one ``Arrived`` or ``Broken`` will follow, and until then its units may be
        written to at any time, whatever else happens."""

    def keep(self, sources: Sequence[Source], seconds: float) -> None:
        """Ask prefillers to keep leases that requests here will need, for ``seconds`` from now at least."""

    def abandon(self, fetch_id: int) -> None:
        """Nobody waits for this fetch any more: stop it if that can be done. Its end is still reported."""

    def release(self, source: Source) -> None:
        """Tell the prefiller that it may take the lease back."""

    def poll(self) -> list[Report]:
        """What has happened since the last call, in order."""
