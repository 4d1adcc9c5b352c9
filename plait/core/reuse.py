"""What requests may take over from one another."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.request import Request
from plait.core.snapshots import SnapshotPolicy


@dataclass(frozen=True, slots=True)
class Reuse:
    """The rules of sharing.

    Args:
        policy: where snapshots are taken.
        has_state: the model has recurrent layers.
        enabled: False keeps nothing for other requests.
        row_invariant: entries written while decoding equal those a prefill would write, and may be
            shared; otherwise only a prompt's own pages are.
    """

    policy: SnapshotPolicy
    has_state: bool
    enabled: bool
    row_invariant: bool

    @property
    def takes_snapshots(self) -> bool:
        return self.enabled and self.has_state

    def reads(self, request: Request) -> bool:
        """Whether it may go on from what others computed."""
        return self.enabled and request.reads_cache

    def limit(self, request: Request, position: int) -> int:
        """Where what others may take over ends, of what the request has below ``position``."""
        return position if self.row_invariant else min(position, request.num_prompt_tokens)
