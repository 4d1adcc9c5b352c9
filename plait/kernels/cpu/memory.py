"""Memory for packed weights, in huge pages where the system gives them.

A step reads every weight once, in streams a panel apart: with pages of 4 KiB that is a miss of the address
cache every 64 lines, and the end of the processor's own prefetching. Systems give huge pages to those who ask
(``madvise``), and only for whole ones, so many matrices share one mapping.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE = 2 * 2**20
_CHUNK = 16 * HUGE
_ALIGNMENT = 64


class HugePages:
    """Hands out memory from mappings that are aligned to huge pages. A mapping is given back when the last
    tensor in it is gone."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> torch.Tensor:
        """uint8 [size], aligned to 64 bytes; what it holds means nothing.

        Raises:
            MemoryError: the system refuses.
        """
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        if whole > self._free.numel():
            mapped = map_aligned(max(_CHUNK, -(-whole // HUGE) * HUGE))
            if mapped.numel() - whole <= self._free.numel():  # keep the larger rest
                return mapped[:size]
            self._free = mapped
        taken, self._free = self._free[:size], self._free[whole:]
        return taken


def map_aligned(size: int) -> torch.Tensor:
    """uint8 [size] in a private mapping of its own that starts at a huge page; ``size`` a multiple of them.

    Memory that is never touched costs nothing.

    Raises:
        MemoryError: the system refuses.
    """
    try:
        mapping = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system refuses {size:,} bytes ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without huge pages: small ones serve as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -data.data_ptr() % HUGE
    return data[first : first + size]


weights_memory = HugePages()
