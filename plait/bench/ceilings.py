"""What this machine can do at best, measured in the same run as the kernels that are held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from plait.bench.timing import fastest, use_threads
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


@dataclass(frozen=True, slots=True)
class Roofline:
    """Ceilings of one number of threads: bytes and float32 operations per second."""

    bandwidth: float
    peak: float

    def seconds(self, moved: float, operations: float) -> float:
        """The least time for a kernel that must move so many bytes and do so many operations
        (Williams, Waterman, Patterson, 2009): max(bytes / bandwidth, operations / peak)."""
        return max(moved / self.bandwidth, operations / self.peak)

    def bound(self, moved: float, operations: float) -> str:
        """Which of the two it is that binds: "memory" or "compute"."""
        return "memory" if moved / self.bandwidth > operations / self.peak else "compute"


def measure_ceilings(threads: int, seconds: float = 0.5) -> tuple[list[Ceiling], Roofline]:
    """Read bandwidth and float32 peak with 1 and with ``threads`` threads, and the roofline of the latter."""
    ceilings: list[Ceiling] = []
    roofline = Roofline(1.0, 1.0)
    for count in sorted({1, threads}):
        use_threads(count)
        bandwidth, how = _bandwidth(seconds)
        ceilings.append(Ceiling("read from memory", count, bandwidth / 1e9, "GB/s", how))
        peak, how = _peak(seconds)
        ceilings.append(Ceiling("float32 multiply-add", count, peak / 1e9, "GFLOP/s", how))
        roofline = Roofline(bandwidth, peak)
    return ceilings, roofline


def _bandwidth(seconds: float) -> tuple[float, str]:
    """Bytes per second, and how they were read."""
    data = torch.ones(_READ_BYTES // 4)
    read: Callable[[], Any]
    if native is not None:
        read, how = (lambda: native.read_memory(data.data_ptr(), data.numel())), "C++ kernel"
    else:
        read, how = data.sum, "torch sum"
    return _READ_BYTES / fastest(read, seconds), how


def _peak(seconds: float) -> tuple[float, str]:
    """Float32 operations per second, and how they were done."""
    if native is not None:
        rounds = 100_000
        operations = native.multiply_add(rounds)
        return operations / fastest(lambda: native.multiply_add(rounds), seconds), "C++ kernel"
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / fastest(lambda: a @ b, seconds), "torch matrix product"
