"""Leases as the worker's half keeps them: who may read what, and until when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from plait.core.orders import Offer

MOST_SECONDS = 3600.0


@dataclass(slots=True)
class _Lease:
    offer: Offer
    until: float


class LeaseTable:
    """Safe to use from the engine's thread and from that of the conversation at once.

    A lease leaves the table before its memory is used again: so what was read is good if, after the reading,
    the lease still stands here. No clocks need to agree for that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def add(self, offer: Offer) -> None:
        with self._lock:
            self._leases[offer.lease_id] = _Lease(offer, self._clock() + offer.seconds)

    def hold(self, lease_id: str, seconds: float) -> Offer | None:
        """Keep a lease for somebody who reads it, for ``seconds`` (an hour at most). None: it is over."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return None
            lease.until = max(lease.until, self._clock() + min(seconds, MOST_SECONDS))
            return lease.offer

    def stands(self, lease_id: str) -> bool:
        with self._lock:
            return lease_id in self._leases

    def end(self, lease_id: str) -> bool:
        """False: it was over already."""
        with self._lock:
            return self._leases.pop(lease_id, None) is not None

    def expire(self) -> tuple[list[str], float | None]:
        """End leases whose time is up: those, and the seconds until the next one's is."""
        with self._lock:
            now = self._clock()
            over = [lease_id for lease_id, lease in self._leases.items() if lease.until <= now]
            for lease_id in over:
                del self._leases[lease_id]
            due = min((lease.until for lease in self._leases.values()), default=None)
            return over, None if due is None else due - now
