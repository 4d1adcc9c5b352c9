"""The loopback connector's wire: engines of one machine, in one process or several, over shared memory.

The arena lies in an anonymous file that exists as long as somebody has it mapped or open, so nothing is left
of it when a process is killed. Peers find it under ``/proc/<process>/fd/<descriptor>`` and map it read-only.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.transfer.base import TransferError, Wire
from plait.transfer.spans import Span

MARK = "/memfd:plait-arena"
"""What the system calls an arena's file; nothing else is ever mapped, whatever a peer says."""


@dataclass(eq=False, slots=True)
class Mapped:
    """A peer's arena. ``data``: uint8 [its bytes], read-only."""

    data: np.ndarray | None


class SharedMemoryWire(Wire):
    """Copies from a peer's arena into the own one, in a thread of its own.

    Args:
        arena: uint8 [bytes], the own arena, on the CPU.
        descriptor: of the file that it lies in.

    Raises:
        ValueError: the arena is not in shared memory.
    """

    def __init__(self, arena: torch.Tensor, descriptor: int | None) -> None:
        if descriptor is None or arena.device.type != "cpu":
            raise ValueError(
                "the loopback connector needs an arena in shared memory: on the CPU, under Linux"
            )
        self._arena = arena.numpy()
        self._descriptor = descriptor
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="transfer-copy")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "shared memory",
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "bytes": self._arena.nbytes,
        }

    def connect(self, description: Mapping[str, Any]) -> Mapped:
        process, descriptor, size = (description.get(name) for name in ("process", "descriptor", "bytes"))
        if description.get("kind") != "shared memory" or not (
            isinstance(process, int) and isinstance(descriptor, int) and isinstance(size, int)
        ):
            raise TransferError("its memory is not reached by the loopback connector; give both the same")
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            if not os.readlink(path).startswith(MARK):
                raise TransferError(f"{path} is no arena")
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise TransferError(
                f"its arena is out of reach ({fault.strerror}: {path}); the loopback connector works between "
                "processes of one user on one machine"
            ) from fault
        try:
            if os.fstat(opened).st_size != size:
                raise TransferError(f"its arena has {os.fstat(opened).st_size:,} bytes, it says {size:,}")
            mapping = mmap.mmap(opened, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        return Mapped(np.frombuffer(mapping, dtype=np.uint8))

    async def read(self, peer: Any, spans: Sequence[Span], stop: Callable[[], bool]) -> None:
        data = peer.data
        if data is None:
            raise TransferError("the connection was closed")
        await asyncio.get_running_loop().run_in_executor(self._copier, self._copy, data, spans, stop)

    def _copy(self, data: np.ndarray, spans: Sequence[Span], stop: Callable[[], bool]) -> None:
        for s in spans:
            if stop():
                raise TransferError("nobody waits for it any more")
            self._arena[s.local : s.local + s.length] = data[s.remote : s.remote + s.length]

    def disconnect(self, peer: Any) -> None:
        peer.data = None  # unmapped when no copy uses it any more

    def close(self) -> None:
        self._copier.shutdown()
        self._arena = np.empty(0, dtype=np.uint8)
