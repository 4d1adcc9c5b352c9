"""The disk as a tier: moves units between the arena and a folder, in two threads beside the steps."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from plait.core.tier import Item, Moved, Name
from plait.worker.arena import Arena
from plait.worker.unit_files import REFRESH_SECONDS, DamagedError, UnitFiles

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Longest wait for a transfer in progress when the engine ends."""


@dataclass(slots=True)
class _Task:
    ticket: int
    item: Item
    index: int


@dataclass(slots=True)
class _Touch:
    units: list[tuple[Name, int]]


class DiskTier:
    """A ``plait.core.tier.Tier`` over ``UnitFiles``.

    Reads have a thread of their own, so that a request never waits for what is being written. When the folder
    takes no more (a full disk, a lost mount) nothing is written from then on, and one line says so; what is
    there is still read.

    Args:
        arena: where units are; each is touched only between ``write`` or ``read`` and its ``Moved``.
        files: where they go.
    """

    def __init__(self, arena: Arena, files: UnitFiles) -> None:
        self.files = files
        self.writable = True
        self._arena = arena
        self._closing = False
        self._over: deque[Moved] = deque()
        self._news = threading.Event()
        self._writes: SimpleQueue[_Task | _Touch | None] = SimpleQueue()
        self._reads: SimpleQueue[_Task | _Touch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(queue, work), name=name, daemon=True)
            for name, queue, work in (
                ("tier-write", self._writes, self._write),
                ("tier-read", self._reads, self._read),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- as the scheduler sees it -----------------------------------------------------------

    def has(self, name: Name) -> bool:
        return self.files.has(name)

    def write(self, ticket: int, item: Item, index: int) -> None:
        self._writes.put(_Task(ticket, item, index))

    def touch(self, units: list[tuple[Name, int]]) -> None:
        self._writes.put(_Touch(units))

    def read(self, ticket: int, item: Item, index: int) -> None:
        self._reads.put(_Task(ticket, item, index))

    def finished(self) -> list[Moved]:
        self._news.clear()
        over = []
        with contextlib.suppress(IndexError):
            while True:
                over.append(self._over.popleft())
        return over

    def wait(self, seconds: float) -> None:
        """Until a transfer is over that ``finished`` has not told, or the time is up."""
        self._news.wait(seconds)

    def close(self) -> None:
        """Begin nothing more; the arena is not touched once this returns."""
        self._closing = True
        for queue in (self._writes, self._reads):
            queue.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    # -- threads ----------------------------------------------------------------------------

    def _serve(self, queue: SimpleQueue[_Task | _Touch | None], work: Callable[[_Task], Moved]) -> None:
        while True:
            try:
                task = queue.get(timeout=REFRESH_SECONDS if queue is self._writes else None)
            except Empty:
                self._refresh()
                continue
            if task is None:
                return
            if isinstance(task, _Touch):
                self.files.touch(task.units)
                continue
            moved = Moved(task.ticket, False)
            try:
                if not self._closing:
                    moved = work(task)
            except Exception:  # a bug; the engine goes on without this unit
                log.exception("a transfer of the prefix cache failed")
            self._over.append(moved)
            self._news.set()

    def _refresh(self) -> None:
        with contextlib.suppress(OSError):  # the next write will tell
            self.files.refresh()

    def _write(self, task: _Task) -> Moved:
        if not self.writable:
            return Moved(task.ticket, False)
        try:
            self._refresh()
            self.files.write(task.item, self._bytes(task), lambda: not self._closing)
        except FileNotFoundError:
            return Moved(task.ticket, False)  # another engine took the half-written file for a dead one's
        except OSError as fault:
            self.writable = False
            log.warning(
                "prefix_cache_dir=%s: %s; nothing more is written there until the next start, "
                "what is there is still read",
                self.files.folder, fault.strerror or fault,
            )  # fmt: skip
            return Moved(task.ticket, False)
        return Moved(task.ticket, True)

    def _read(self, task: _Task) -> Moved:
        try:
            unit = self._unit(task)
            if unit.device.type == "cpu":
                reason = self.files.read(task.item, unit.numpy().data)
            else:
                staged = torch.empty(unit.shape, dtype=torch.uint8)
                reason = self.files.read(task.item, staged.numpy().data)
                unit.copy_(staged)
        except FileNotFoundError:
            return Moved(task.ticket, False)  # another engine has removed it
        except DamagedError as fault:
            log.warning("prefix_cache_dir=%s: a damaged file is ignored: %s", self.files.folder, fault)
            return Moved(task.ticket, False)
        except OSError as fault:
            log.warning("prefix_cache_dir=%s: %s", self.files.folder, fault)
            return Moved(task.ticket, False)
        return Moved(task.ticket, True, reason)

    def _unit(self, task: _Task) -> torch.Tensor:
        """uint8 [bytes of the page or state], in the arena."""
        return self._arena.unit(task.item.kind, task.index)

    def _bytes(self, task: _Task) -> memoryview:
        return self._unit(task).cpu().numpy().data
