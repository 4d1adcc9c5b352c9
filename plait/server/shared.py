"""What the API processes of one server have in common, as each of them sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.server.board import Board


@dataclass(frozen=True, slots=True)
class Shared:
    """This API process is number ``index`` of ``count``.

    ``folder``: where they keep what they count together; None where there is one process.
    """

    index: int = 0
    count: int = 1
    folder: Path | None = None

    @property
    def metrics(self) -> Path | None:
        """Folder of the histograms that all processes add to."""
        return self.folder

    def board(self) -> Board:
        """Of the requests that wait for their first token."""
        return Board(self.folder and self.folder / "waiting", self.index, self.count)
