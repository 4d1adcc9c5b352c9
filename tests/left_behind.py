"""What a server leaves behind."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from live import alive

MARK = "PLAIT_TEST_MARK"


class Traces:
    """What a server leaves behind: processes, by a mark in their environment; shared memory; files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._mark = uuid.uuid4().hex
        self._shared = set(os.listdir("/dev/shm"))

    def environment(self) -> dict[str, str]:
        return {MARK: self._mark, "TMPDIR": str(self.folder)}

    def processes(self) -> list[int]:
        marked = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is another user's
        return [pid for pid in found if alive(pid)]

    def left(self) -> dict[str, list[object]]:
        shared = sorted(set(os.listdir("/dev/shm")) - self._shared)
        return {"processes": [*self.processes()], "shared": [*shared], "files": [*self.folder.iterdir()]}


NOTHING: dict[str, list[object]] = {"processes": [], "shared": [], "files": []}
