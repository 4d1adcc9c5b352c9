"""How long requests wait until they take part in steps."""

from __future__ import annotations

import time
from collections.abc import Iterable


class QueueClock:
    """Seconds from a request's arrival to its first admission. Preempted requests keep their first one."""

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}
        self._queued: dict[str, float] = {}

    def arrived(self, request_id: str) -> None:
        self._arrived[request_id] = time.monotonic()

    def admitted(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            arrived = self._arrived.pop(request_id, None)
            if arrived is not None:
                self._queued[request_id] = time.monotonic() - arrived

    def take(self, request_id: str) -> float | None:
        """What is known of the request and was not taken yet."""
        return self._queued.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._arrived.pop(request_id, None)
        self._queued.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._arrived) + len(self._queued)
