"""Whether a newcomer finds memory."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.handover import HandOver
from plait.core.queues import Queues


class Room:
    """What could be had besides what those that are in already still need: a check, not a reservation."""

    def __init__(self, cache: Cache, queues: Queues, handover: HandOver | None) -> None:
        self.cache = cache
        self.queues = queues
        self.handover = handover

    @property
    def num_received(self) -> int:
        """Prompts from other engines that are here, or on their way, and do not run yet."""
        return 0 if self.handover is None else len(self.handover.receiving) + len(self.queues.landed)

    def fits(self, pages_wanted: int, states: int = 1) -> bool:
        """Whether a newcomer's pages and states can be had besides what running prompts still need.

        A page is left for each running answer, so that a newcomer is not preempted at once.
        """
        size, running = self.cache.geometry.pages_for, self.queues.running
        behind = sum(max(0, size(r.length) - len(r.pages)) for r in running)
        spare = len(running) + self.num_received
        return pages_wanted + behind + spare <= self.cache.memory.available_pages(more_states=states)
