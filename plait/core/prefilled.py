"""The prefiller's side of scheduling: prompts that are computed here, and answered by another engine."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.counters import SchedulerCounters
from plait.core.handover import HandOver
from plait.core.index import Match
from plait.core.orders import Offer
from plait.core.progress import Progress
from plait.core.queues import Queues
from plait.core.request import Request, Status
from plait.core.room import Room


class Prefilled:
    """Turns computed prompts into leases, and tells their clients of the offers."""

    def __init__(
        self, cache: Cache, queues: Queues, room: Room, counters: SchedulerCounters, handover: HandOver
    ) -> None:
        self.cache = cache
        self.queues = queues
        self.room = room
        self.counters = counters
        self.handover = handover
        self._told: list[Progress] = []

    def lease(self, request: Request) -> None:
        """A prompt is computed as far as it goes here; its memory stays for another engine."""
        self.queues.remove(request)
        self._forget(request)
        self.handover.leave(request)

    def lease_at_once(self, request: Request, match: Match) -> bool:
        """The cache holds all of a prompt that is to be computed here. False: it waits for memory."""
        if request.leave_at and not (
            self.room.fits(self.cache.pages_wanted(request, match))
            and self.cache.entrance.admit(request, match)
        ):
            return False
        self.queues.remove(request)
        self.counters.count_admission(request)
        self._forget(request)
        if request.leave_at:
            self.cache.entrance.count_hit(request)
            self.handover.leave(request)
        else:
            request.status = Status.FINISHED
            self._tell(request, Offer("", 0, b"", (), None, 0.0))
        return True

    def _forget(self, request: Request) -> None:
        self.queues.forget(request)
        self.counters.count_end("length")

    def _tell(self, request: Request, offer: Offer) -> None:
        self._told.append(
            Progress(
                request.id,
                finish_reason="length",
                num_cached_tokens=request.num_cached_tokens or 0,
                offer=offer,
            )
        )

    def drain(self) -> list[Progress]:
        """Prompts that may be fetched from now on."""
        for request, offer in self.handover.settled():
            self._tell(request, offer)
        told, self._told = self._told, []
        return told
