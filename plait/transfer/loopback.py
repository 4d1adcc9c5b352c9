"""The loopback connector's wire: engines of one machine, in one process or several, over shared memory.

The arena lies in an anonymous file that exists as long as somebody has it mapped or open, so nothing is left
of it when a process is killed. Peers find it under ``/proc/<process>/fd/<descriptor>``. They read it like a
file, straight into their own arena: mapped, it would count as their memory too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from plait.transfer.base import TransferError, Wire
from plait.transfer.spans import Span

MARK = "/memfd:plait-arena"
"""What the system calls an arena's file; nothing else is ever read, whatever a peer says."""


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
        self._arena = arena.numpy().data
        self._descriptor = descriptor
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="transfer-copy")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "shared memory",
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "bytes": self._arena.nbytes,
        }

    def connect(self, description: Mapping[str, Any]) -> int:
        """A descriptor of the peer's arena."""
        named = [description.get(name) for name in ("process", "descriptor", "bytes")]
        if description.get("kind") != "shared memory" or not all(type(value) is int for value in named):
            raise TransferError("its memory is not reached by the loopback connector; give both the same")
        process, descriptor, size = named
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
        found = os.fstat(opened).st_size
        if found != size:
            os.close(opened)
            raise TransferError(f"its arena has {found:,} bytes, it says {size:,}")
        return opened

    async def read(self, peer: Any, spans: Sequence[Span], stop: Callable[[], bool]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._copier, self._copy, peer, spans, stop)

    def _copy(self, peer: int, spans: Sequence[Span], stop: Callable[[], bool]) -> None:
        for s in spans:
            if stop():
                raise TransferError("nobody waits for it any more")
            done = 0
            while done < s.length:  # the system moves at most 2 GiB at a time
                target = self._arena[s.local + done : s.local + s.length]
                count = os.preadv(peer, [target], s.remote + done)
                if not count:
                    raise TransferError("its arena ends before what it named")
                done += count

    def disconnect(self, peer: Any) -> None:
        self._copier.submit(os.close, peer)  # behind any copy that is under way

    def close(self) -> None:
        self._copier.shutdown()
        self._arena = memoryview(b"")
