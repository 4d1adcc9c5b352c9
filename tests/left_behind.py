"""What a server leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
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
        self._seen: set[int] = set()

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
        self._seen.update(found)
        return [pid for pid in found if alive(pid)]

    def left(self) -> dict[str, list[object]]:
        processes = self.processes()
        shared = sorted(name for name in set(os.listdir("/dev/shm")) - self._shared if self._ours(name))
        if shared:
            others = _mapped(set(processes))
            shared = [name for name in shared if f"/dev/shm/{name}" not in others]
        return {"processes": [*processes], "shared": [*shared], "files": [*self.folder.iterdir()]}

    def _ours(self, name: str) -> bool:
        """Whether shared memory may be ours: names that OpenMP's libraries choose tell the process."""
        owner = re.fullmatch(r"__KMP_REGISTERED_LIB_(\d+)_\d+", name)
        return owner is None or int(owner[1]) in self._seen


NOTHING: dict[str, list[object]] = {"processes": [], "shared": [], "files": []}


def _mapped(but: set[int]) -> str:
    """What all processes of the machine but these have mapped: other programs use shared memory, too."""
    maps = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) not in but:
            with contextlib.suppress(OSError):
                maps.append((entry / "maps").read_text())
    return "\n".join(maps)
