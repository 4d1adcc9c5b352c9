"""The one allocation that holds pages, states and snapshots."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys

import torch

from plait.core.geometry import Geometry
from plait.core.plan import Kind

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Named by Python from 3.13 on; the value is Linux's."""


class Arena:
    """A flat run of bytes, cut by ``geometry``.

    Nothing is ever zeroed: what a unit holds before it is written means nothing. On the CPU the memory is
    committed as it is touched, in huge pages where the system gives them.

    Args:
        shared: put the memory into an anonymous file (CPU, Linux), so that other processes can map it.

    Attributes:
        data: uint8 [num_slabs * slab_bytes].
        descriptor: of that file; None: the memory is private.

    Raises:
        ValueError: ``geometry`` holds no slab, or the system has no such files.
        MemoryError: the system refuses so much address space (CPU); torch raises its own on a GPU.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device | str = "cpu", *, shared: bool = False
    ) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        size = geometry.num_slabs * geometry.slab_bytes
        if size == 0:
            raise ValueError(
                f"an arena of {geometry.arena_bytes:,} bytes holds no slab of {geometry.slab_bytes:,}; "
                "give it more memory"
            )
        self.descriptor = _open(size, self.device) if shared else None
        self._mapping = _map(size, self.descriptor) if self.device.type == "cpu" else None
        if self._mapping is None:
            self.data = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def page(self, index: int) -> torch.Tensor:
        """uint8 [page_bytes]: a view of one page."""
        return self.unit(Kind.PAGE, index)

    def state(self, index: int) -> torch.Tensor:
        """uint8 [state_bytes]: a view of one state unit."""
        return self.unit(Kind.STATE, index)

    def copy(self, kind: Kind, source: int, target: int) -> None:
        """Copy one whole unit over another of the same kind.

        Raises:
            IndexError: there is no such unit.
        """
        self.unit(kind, target).copy_(self.unit(kind, source))

    def close(self) -> None:
        """Give the memory back. Views that others still hold must not be read any more."""
        self.data = torch.empty(0, dtype=torch.uint8)
        if self._mapping is not None:
            # At once, even while views keep the mapping alive. Who has it mapped elsewhere then reads zeros.
            advice = "MADV_DONTNEED" if self.descriptor is None else "MADV_REMOVE"
            if hasattr(mmap, advice):
                self._mapping.madvise(getattr(mmap, advice))
            self._mapping = None
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def unit(self, kind: Kind, index: int) -> torch.Tensor:
        """uint8 [bytes of a page or a state]: a view.

        Raises:
            IndexError: there is no such unit.
        """
        g = self.geometry
        if kind == Kind.PAGE:
            count, stride, size = g.num_pages, g.page_bytes, g.page_bytes
        else:
            count, stride, size = g.num_states, g.state_stride, g.state_bytes
        if not 0 <= index < count:
            raise IndexError(f"{kind.name.lower()} {index}: the arena holds {count} of them, from 0 up")
        start = index * stride  # a Python integer: no 32-bit overflow
        return self.data[start : start + size]


def _open(size: int, device: torch.device) -> int:
    """An anonymous file of so many bytes, none of them touched."""
    if device.type != "cpu" or not hasattr(os, "memfd_create"):
        raise ValueError(
            f"an arena on {device.type} under {sys.platform} cannot be shared with other processes"
        )
    descriptor = os.memfd_create("plait-arena", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def _map(size: int, descriptor: int | None) -> mmap.mmap:
    """Memory without backing, private unless a file is given: pages that nobody touches cost nothing."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor is None else mmap.MAP_SHARED
    try:
        mapping = mmap.mmap(-1 if descriptor is None else descriptor, size, flags=kind | _MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system refuses an arena of {size:,} bytes ({error}); ask for less") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without huge pages: small ones serve as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
