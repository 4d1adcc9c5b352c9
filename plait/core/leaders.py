"""Leaders: requests that compute, right now, what another one would have to compute as well."""

from __future__ import annotations

from plait.core.cache import Cache
from plait.core.draft import Draft
from plait.core.flight import Flight
from plait.core.request import Request
from plait.core.snapshots import SnapshotKind


class Leaders:
    """Finds whom a waiting request follows.

    The follower holds nothing and is asked anew in each step, so it depends on no one's progress but of those
    that are scheduled.
    """

    def __init__(self, cache: Cache, flight: Flight) -> None:
        self.cache = cache
        self.flight = flight

    def holds_up(self, draft: Draft, request: Request, found: int) -> bool:
        """Whether another request computes more of its prefix than the ``found`` tokens that are cached.

        A leader in this very step is asked for a snapshot where the two part.
        """
        if not self.cache.reuse.reads(request):
            return False
        best, leader = found, None
        for part in draft.parts:
            fork = self._common_prefix(request, part.request)
            if fork > max(best, part.start):
                best, leader = fork, part.request
        if leader is None:
            return self._is_in_flight(request, found)
        leader.marks.setdefault(best, SnapshotKind.FORK)
        return True

    def _is_in_flight(self, request: Request, found: int) -> bool:
        """Whether more than ``found`` tokens of it can be shared once the steps in flight are over."""
        has_state, floor = self.cache.geometry.has_state, self.cache.reuse.policy.floor
        for part in self.flight.parts():
            if part.start >= request.num_tokens or not part.is_current:
                continue
            fork = min(self._common_prefix(request, part.request), part.end)
            ends = [export.position for export in part.exports] if has_state else [floor(fork)]
            if any(found < end <= fork for end in ends):
                return True
        return False

    def _common_prefix(self, a: Request, b: Request) -> int:
        """Tokens of the longest prefix of both that could be shared, by the hash chains known so far."""
        low, high = 0, min(len(a.page_keys), len(b.page_keys))
        while low < high:  # equal keys mean equal prefixes
            middle = (low + high + 1) // 2
            if a.page_keys[middle - 1] == b.page_keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return self.cache.reuse.policy.floor(low * self.cache.geometry.page_size)
