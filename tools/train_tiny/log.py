"""The log of a run: one JSON object a line, so that it can be read while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    """Appends to ``log.jsonl``; silent in all processes but the first."""

    def __init__(self, folder: Path, rank: int):
        self._path = folder / "log.jsonl" if rank == 0 else None

    def write(self, event: str, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"event": event, **values}) + "\n")
