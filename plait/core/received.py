"""The decoder's side of scheduling: requests whose prompt was computed by another engine."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.endings import Endings
from plait.core.handover import HandOver
from plait.core.queues import Queues
from plait.core.request import Request
from plait.core.room import Room


class Received:
    """Gives them memory, and queues them anew when their prompt has come, or will not.

    Args:
        most: prompts that may be here, or on their way, without running.
    """

    def __init__(
        self, cache: Cache, queues: Queues, room: Room, endings: Endings, handover: HandOver, most: int
    ) -> None:
        self.cache = cache
        self.queues = queues
        self.room = room
        self.endings = endings
        self.handover = handover
        self.most = most
        self._failed: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        """As many prompts are here, or on their way, as may run at once: further ones stay where they are."""
        return self.room.num_received >= self.most

    def receive(self, request: Request) -> bool:
        """Give memory to a waiting request whose prompt lies elsewhere. False: it waits for memory."""
        match = self.cache.match(request)
        known = self.handover.needs(request, match)
        if known is None:
            self.handover.counters.forgone += 1
            self.handover.forgo(request)
            return True
        shared = sum(1 for node in known if node.page.refs)
        wanted = self.cache.geometry.pages_for(request.num_tokens) - shared
        if not self.room.fits(wanted) or not self.handover.begin(request, known):
            return False
        self.queues.waiting.remove(request)
        return True

    def collect(self) -> None:
        """Prompts that have come, and those that will not."""
        landed, failed = self.handover.poll()
        for request in landed:
            request.marks = self.cache.entrance.marks(request, known=request.num_computed_tokens)
            self.queues.land(request)
        for request, reason in failed.items():
            self.queues.wait(request)
            if not self.handover.config.recompute:
                self._failed[request.id] = reason
                self.endings.finish(request, "error")

    def drain(self) -> dict[str, str]:
        """Begin fetches into memory that is quiet by now.

        Returns:
            Requests that failed since the last call, with the reason.
        """
        self.handover.start()
        failed, self._failed = self._failed, {}
        return failed
