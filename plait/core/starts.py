"""How a waiting request starts, or goes on: from what the cache has of it, or from the swap buffer."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.chunks import Chunks
from plait.core.draft import Draft
from plait.core.leaders import Leaders
from plait.core.prefilled import Prefilled
from plait.core.request import Request
from plait.core.room import Room
from plait.core.swap import SwapSpace
from plait.core.tiers import Tiers


class Starts:
    """Gives a waiting request memory for its first chunk, or says what it waits for."""

    def __init__(
        self,
        cache: Cache,
        chunks: Chunks,
        room: Room,
        leaders: Leaders,
        tiers: Tiers | None,
        swap: SwapSpace | None,
        prefilled: Prefilled | None,
    ) -> None:
        self.cache = cache
        self.chunks = chunks
        self.room = room
        self.leaders = leaders
        self.tiers = tiers
        self.swap = swap
        self.prefilled = prefilled

    def start(self, draft: Draft, request: Request) -> int | None:
        """Give the request memory for a chunk.

        Returns:
            Tokens of the chunk; 0: it must wait for memory or budget; None: it waits for something else, and
            nobody behind it waits, or it has left the queue.
        """
        if self.swap is not None and self.swap.is_usable(request):
            return self._resume(self.swap, draft, request)
        if self.tiers is not None and self.tiers.holds_up(request, self.room.fits):
            return None
        match = self.cache.match(request)
        start = match.position(self.cache.geometry.page_size)
        if self.leaders.holds_up(draft, request, start):
            return None
        if request.leave_at is not None and start >= request.leave_at:
            assert self.prefilled is not None
            return None if self.prefilled.lease_at_once(request, match) else 0
        count = self.chunks.count(draft, request, start)
        if count < 1 or not self.room.fits(self.cache.pages_wanted(request, match)):
            return 0
        if not self.cache.entrance.admit(request, match):
            return 0
        if not self.cache.holdings.grow(request, start + count):
            self.cache.holdings.release(request)
            request.num_computed_tokens = request.num_committed_tokens = 0
            return 0
        self.cache.entrance.count_hit(request)
        if self.tiers is not None:
            self.tiers.used(request)
        return count

    def _resume(self, swap: SwapSpace, draft: Draft, request: Request) -> int | None:
        """As ``start``, from the swap buffer."""
        image = request.image
        assert image is not None
        if image.committed < image.cursor:
            return None  # its last step is still in flight, and a token may come of it
        count = self.chunks.count(draft, request, image.cursor)
        if count < 1 or not self.room.fits(self.cache.geometry.pages_for(request.num_tokens)):
            return 0
        return count if swap.resume(request, image.cursor + count) else 0
