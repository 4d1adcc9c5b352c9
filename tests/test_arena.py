"""The arena: lazily committed, copied by whole units, addressed without overflow."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from plait.core.geometry import Geometry
from plait.core.plan import Kind
from plait.worker.arena import Arena

torch.set_num_threads(1)


def geometry(arena_bytes: int = 64 * 1024, *, page_bytes: int = 1024, state_bytes: int = 1500) -> Geometry:
    return Geometry(16, page_bytes, state_bytes, 1, arena_bytes)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_untouched_memory_costs_nothing_and_close_gives_it_back() -> None:
    before = resident_bytes()
    arena = Arena(geometry(8 << 30, page_bytes=1 << 20))
    assert resident_bytes() - before < 64 << 20
    arena.data[: 256 << 20].fill_(1)
    assert resident_bytes() - before > 200 << 20
    view = arena.page(0)
    arena.close()
    assert resident_bytes() - before < 64 << 20
    assert view.numel() == 1 << 20  # still mapped, though empty


def test_offsets_beyond_32_bits() -> None:
    arena = Arena(geometry(6 << 30, page_bytes=1 << 20, state_bytes=3 << 20))
    last = arena.geometry.num_pages - 1
    arena.page(0).fill_(7)
    arena.copy(Kind.PAGE, 0, last)
    assert arena.page(last).unique().tolist() == [7]
    assert last * (1 << 20) > 2**32
    arena.close()


def test_copy_moves_whole_units_and_nothing_else() -> None:
    arena = Arena(geometry())
    g = arena.geometry
    arena.data.fill_(9)
    arena.state(1).copy_(torch.arange(g.state_bytes) % 251)
    before = arena.data.clone()
    arena.copy(Kind.STATE, 1, 3)
    start = 3 * g.state_stride
    assert torch.equal(arena.state(3), arena.state(1))
    changed = (arena.data != before).nonzero()[:, 0]
    assert start <= changed.min()
    assert changed.max() < start + g.state_bytes
    assert len(arena.page(5)) == g.page_bytes
    assert arena.page(5).data_ptr() == arena.data.data_ptr() + 5 * g.page_bytes


def test_units_that_do_not_exist() -> None:
    arena = Arena(geometry())
    with pytest.raises(IndexError, match="page 64: the arena holds 64"):
        arena.copy(Kind.PAGE, 0, 64)
    with pytest.raises(IndexError, match="state -1"):
        arena.state(-1)
    with pytest.raises(ValueError, match="holds no slab"):
        Arena(geometry(10))
    stateless = Arena(geometry(state_bytes=0))
    with pytest.raises(IndexError, match="holds 0"):
        stateless.state(0)


def test_more_than_the_address_space() -> None:
    with pytest.raises(MemoryError, match="ask for less"):
        Arena(geometry(1 << 60, page_bytes=1 << 20))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files are Linux's")
def test_a_shared_arena_is_a_file_that_others_can_read_and_that_leaves_nothing() -> None:
    cut = geometry(64 * 4096, page_bytes=4096)
    arena = Arena(cut, shared=True)
    assert arena.descriptor is not None
    theirs = os.dup(arena.descriptor)
    try:
        arena.page(5).fill_(7)
        assert os.pread(theirs, 4096, 5 * 4096) == b"\7" * 4096
        assert os.fstat(theirs).st_size == cut.num_slabs * cut.slab_bytes
        view = arena.data  # as somebody may still hold one
        arena.close()
        assert os.fstat(theirs).st_blocks == 0  # its memory is given back, not the file's end moved
        assert os.pread(theirs, 4096, 5 * 4096) == bytes(4096)
        assert view.numel()
    finally:
        os.close(theirs)


def test_an_arena_on_a_device_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        Arena(geometry(), "meta", shared=True)
