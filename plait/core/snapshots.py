"""Where snapshots of recurrent state are taken, and what they are worth.

A snapshot costs as much memory as 1,500 to 3,000 tokens of KV, so states *could* be shared at every
published position and *are* kept at few.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.core.geometry import Geometry, round_up


class SnapshotKind(enum.IntEnum):
    """Why a snapshot was taken; a higher number is worth more."""

    SPACED = 0
    FORK = 1
    BOUNDARY = 2
    TAIL = 3
    LEAF = 4


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Decides the positions at which a request exports its state.

    * the tail: the last published position that leaves a token to compute, in a conversation that at or
      before the end of the last message (the next turn does not repeat the generation prompt behind it);
    * boundaries: positions that are likely to be shared, such as the end of the system prompt;
    * forks: where the request leaves a known prefix, found while matching;
    * spaced: every ``interval`` tokens, at absolute positions, so that requests with a common prefix
      want the same ones. The interval is at least the slot-to-KV ratio: the spaced snapshots of a prompt
      never take more memory than its pages. They are not counted against ``max_marks``.
    """

    interval: int
    grid: int
    """published positions are multiples of this"""
    max_marks: int = 4
    """most marked positions (all kinds but SPACED) per prompt"""

    @classmethod
    def of(cls, geometry: Geometry, interval: int | None = None) -> SnapshotPolicy:
        """``interval`` tokens between spaced snapshots, or the smallest that pays."""
        grid = geometry.publish_grid
        return cls(round_up(max(1, interval or geometry.tokens_per_state), grid), grid)

    def floor(self, position: int) -> int:
        return position // self.grid * self.grid

    def marks(
        self,
        num_prompt_tokens: int,
        found: int,
        known: int,
        tail: int | None = None,
        boundaries: Sequence[int] = (),
    ) -> dict[int, SnapshotKind]:
        """Marked positions of a prompt.

        Args:
            num_prompt_tokens: length of the prompt.
            found: tokens restored from a snapshot.
            known: tokens whose pages are cached; beyond ``found`` they lack a snapshot.
            tail: end of the last message; None: the prompt's end.
            boundaries: further positions worth a snapshot; beyond ``max_marks`` the first ones go.
        """
        last = num_prompt_tokens - 1
        wanted = {self.floor(known): SnapshotKind.FORK}
        wanted |= {self.floor(min(p, last)): SnapshotKind.BOUNDARY for p in boundaries}
        wanted[self.floor(last if tail is None else min(tail, last))] = SnapshotKind.TAIL
        kept = sorted((p for p in wanted if p > found), key=lambda p: (wanted[p], p), reverse=True)
        return {position: wanted[position] for position in kept[: self.max_marks]}

    def due(self, marks: dict[int, SnapshotKind], start: int, end: int) -> Iterator[tuple[int, SnapshotKind]]:
        """Positions in (start, end] at which a snapshot is wanted, ascending."""
        spaced = range((start // self.interval + 1) * self.interval, end + 1, self.interval)
        positions = dict.fromkeys(spaced, SnapshotKind.SPACED)
        positions.update((p, kind) for p, kind in marks.items() if start < p <= end)
        yield from sorted(positions.items())
