"""Counts that the API processes of one server share: each writes its own, all read the sum."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


class Board:
    """One number of each of ``count`` processes; this one's is ``index``.

    Args:
        file: that they share; None: there is one process.
    """

    def __init__(self, file: Path | None = None, index: int = 0, count: int = 1) -> None:
        size = 8 * count
        if file is None:
            self._memory = mmap.mmap(-1, size)
        else:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(descriptor).st_size < size:
                    os.ftruncate(descriptor, size)
                self._memory = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        # A number is written by one process, in one piece: nothing is locked.
        self._numbers = memoryview(self._memory).cast("q")
        self._index = index
        self.set(0)  # a process that died here may have left something

    def set(self, number: int) -> None:
        """This process's number."""
        self._numbers[self._index] = number

    def total(self) -> int:
        """The sum over all processes."""
        return sum(self._numbers)
