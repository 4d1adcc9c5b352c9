"""What this machine can do at best, measured in the same run as the kernels that are held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from plait.bench.stats import Ratio, paired_ratio
from plait.bench.timing import fastest, use_threads
from plait.kernels.cpu.memory import map_aligned
from plait.kernels.cpu.native import native

_READ_BYTES = 256 * 2**20
"""Read at once: several times the last-level cache of common machines, so that it comes from memory."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One ceiling; ``value`` in ``unit`` (GB/s: 1e9 bytes, GFLOP/s: 1e9 operations per second)."""

    name: str
    threads: int
    value: float
    unit: str
    how: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Roofline:
    """Read bandwidth and float32 peak of this machine with so many threads, to be measured again and again.

    Attributes:
        bandwidth, peak: bytes and operations per second, the best seen so far.
    """

    def __init__(self, threads: int, seconds: float) -> None:
        use_threads(threads)
        self._read, self.read_by = _reader()
        self._multiply, self._operations, self.multiplied_by = _multiplier()
        self.bandwidth = self.peak = 0.0
        self.measure("memory", seconds)
        self.measure("compute", seconds)

    def measure(self, bound: str, seconds: float) -> float:
        """Measure one of the two anew, for so many seconds: bytes ("memory") or operations per second."""
        if bound == "memory":
            now = _READ_BYTES / fastest(self._read, seconds)
            self.bandwidth = max(self.bandwidth, now)
        else:
            now = self._operations / fastest(self._multiply, seconds)
            self.peak = max(self.peak, now)
        return now

    def bound(self, moved: float, operations: float) -> str:
        """What binds a kernel that must move so many bytes and do so many operations: "memory" or "compute"
        (Williams, Waterman, Patterson, 2009: the least time is max(bytes / bandwidth, operations / peak))."""
        return "memory" if moved / self.bandwidth > operations / self.peak else "compute"

    def share(
        self, call: Callable[[], Any], moved: float, operations: float, seconds: float, pairs: int
    ) -> tuple[float, Ratio | None]:
        """Seconds of the fastest call, and its share of what binds it, in pairs of one after the other.

        Args:
            seconds: for all calls together; the ceilings take as much again.
        """
        bound = self.bound(moved, operations)
        amount = moved if bound == "memory" else operations
        taken, least = [], []
        for number in range(pairs):
            for ceiling in (True, False) if number % 2 else (False, True):
                if ceiling:
                    least.append(amount / self.measure(bound, seconds / pairs))
                else:
                    taken.append(fastest(call, seconds / pairs))
        return min(taken), paired_ratio(taken, least)


def measure_ceilings(threads: int, seconds: float = 0.5) -> tuple[list[Ceiling], Roofline]:
    """Ceilings with 1 and with ``threads`` threads, and the roofline of the latter."""
    ceilings: list[Ceiling] = []
    for count in sorted({1, threads}):
        roofline = Roofline(count, seconds)
        ceilings += [
            Ceiling("read from memory", count, roofline.bandwidth / 1e9, "GB/s", roofline.read_by),
            Ceiling("float32 multiply-add", count, roofline.peak / 1e9, "GFLOP/s", roofline.multiplied_by),
        ]
    return ceilings, roofline


def _reader() -> tuple[Callable[[], Any], str]:
    """Reads _READ_BYTES, and how."""
    data = map_aligned(_READ_BYTES).view(torch.float32).fill_(1)
    if native is None:
        return data.sum, "torch sum"
    return (lambda: native.read_memory(data.data_ptr(), data.numel())), "C++ kernel, four streams a thread"


def _multiplier() -> tuple[Callable[[], Any], float, str]:
    """Multiplies, how many operations those are, and how."""
    if native is not None:
        rounds = 100_000
        return (lambda: native.multiply_add(rounds)), native.multiply_add(rounds), "C++ kernel, in registers"
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    return (lambda: a @ b), 2 * size**3, "torch matrix product"
