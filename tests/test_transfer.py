"""The parts of a connector on their own: which bytes, the conversation, peers that misbehave."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.geometry import Geometry
from plait.core.orders import Arrived, Broken, Fetch, Offer, Report, Returned, Source
from plait.kernels.layout import CacheLayout, CacheViews, PageLayout, StateLayout
from plait.transfer import words as w
from plait.transfer.loopback import SharedMemoryWire
from plait.transfer.pull import PullWorker
from plait.transfer.spans import ArenaMap, Span, UnitMap, parts_of, readers, span
from plait.worker.arena import Arena

# -- which bytes ---------------------------------------------------------------------------------


def layout(heads: int, groups: int) -> CacheLayout:
    page = PageLayout(16, num_layers=2, num_kv_heads=heads, head_dim=24, dtype=torch.int8)
    state = StateLayout(3, groups, value_heads=2, key_dim=8, value_dim=12, conv_width=4,
                        conv_dtype=torch.float32, dtype=torch.float32)  # fmt: skip
    return CacheLayout(page, state)


class Rank:
    """One rank of a tensor-parallel engine, with a page and a state in its arena."""

    def __init__(self, rank: int, degree: int, heads: int, groups: int, slabs: int) -> None:
        self.heads, self.groups = parts_of(rank, degree, heads), parts_of(rank, degree, groups)
        self.layout = layout(len(self.heads), len(self.groups))
        slab = self.layout.geometry(0, 1).slab_bytes
        self.geometry = self.layout.geometry(slabs * slab, 1)
        self.arena = torch.full((slabs * slab + 64,), 0x55, dtype=torch.uint8)
        skip = -self.arena.data_ptr() % 64
        self.arena = self.arena[skip : skip + slabs * slab]
        self.views = CacheViews(self.arena, self.layout, self.geometry)
        own = ArenaMap.of(self.layout, self.geometry)
        self.pages = replace(own.pages, first=self.heads.start, total=heads)
        self.states = replace(own.states, first=self.groups.start, total=groups)

        self.page = self.geometry.slab_pages * (slabs - 3)  # in different slabs: they share the bytes
        self.state = self.geometry.slab_states * (slabs - 1)

    def fill(self) -> None:
        """Numbers that depend on the head or group alone, as those of a model do."""
        for i, head in enumerate(self.heads):
            random = torch.Generator().manual_seed(head)
            for cache in self.views.attention:
                for keys in (cache.k, cache.v):
                    keys[self.page, i].random_(-100, 100, generator=random)
                for scale in (cache.k_scale, cache.v_scale):
                    assert scale is not None
                    scale[self.page, i].uniform_(generator=random)
        for i, group in enumerate(self.groups):
            random = torch.Generator().manual_seed(1000 + group)
            for cache in self.views.recurrent:
                for part in (cache.conv, cache.temporal):
                    part[self.state, i].uniform_(generator=random)

    def numbers(self) -> list[torch.Tensor]:
        pages = [t[self.page] for c in self.views.attention for t in (c.k, c.v, c.k_scale, c.v_scale)]
        return pages + [t[self.state] for c in self.views.recurrent for t in (c.conv, c.temporal)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4, 8]), st.data())
def test_shards_of_any_degree_fit_together(theirs: int, ours: int, heads: int, data: st.DataObject) -> None:
    """Prefillers of one degree, decoders of another: each rank gets its heads, one span per unit and rank."""
    groups = data.draw(st.sampled_from([2, 4, 8]))
    remote = [Rank(r, theirs, heads, groups, slabs=5) for r in range(theirs)]
    for rank in remote:
        rank.fill()
    for r in range(ours):
        local, whole = (Rank(r, ours, heads, groups, slabs=n) for n in (7, 4))
        whole.fill()
        spans = 0
        for kind in ("page", "state"):
            mine = getattr(local, kind + "s")
            for number, parts in readers(mine, [getattr(other, kind + "s") for other in remote]):
                peer = remote[number]
                s = span(mine, getattr(peer, kind + "s"), parts, getattr(local, kind), getattr(peer, kind))
                local.arena[s.local : s.local + s.length] = peer.arena[s.remote : s.remote + s.length]
                spans += 1
        assert spans <= 2 * max(1, theirs // ours)
        for got, want in zip(local.numbers(), whole.numbers(), strict=True):
            assert torch.equal(got, want)


def test_one_span_per_unit_between_equals() -> None:
    rank = Rank(0, 1, heads=3, groups=5, slabs=4)
    [(_, parts)] = readers(rank.pages, [rank.pages])
    assert span(rank.pages, rank.pages, parts, 2, 1) == Span(
        rank.layout.page_bytes, 2 * rank.layout.page_bytes, 3 * rank.layout.page.head_bytes
    )
    with pytest.raises(ValueError, match="holds head 2"):
        readers(rank.pages, [replace(rank.pages, parts=2)])
    with pytest.raises(ValueError, match="cannot be shared out"):
        parts_of(0, 2, 3)


# -- the conversation ------------------------------------------------------------------------------

PAGE_BYTES, STATE_BYTES = 4096, 9000
GEOMETRY = Geometry(16, PAGE_BYTES, STATE_BYTES, 1, 40 * 4 * PAGE_BYTES)
MAP = ArenaMap(
    16,
    UnitMap(PAGE_BYTES, PAGE_BYTES // 2, 0, 2, 2),
    UnitMap(GEOMETRY.state_stride, STATE_BYTES // 3, 0, 3, 3),
    GEOMETRY.num_slabs * GEOMETRY.slab_bytes,
)


class Side:
    """An arena with its worker's half; ``pattern`` fills it."""

    def __init__(self, name: str, pattern: int, identity: str = "same", port: int = 0) -> None:
        self.name = name
        self.arena = Arena(GEOMETRY, shared=True)
        self.arena.data.random_(0, 256, generator=torch.Generator().manual_seed(pattern))
        wire = SharedMemoryWire(self.arena.data, self.arena.descriptor)
        self.worker = PullWorker(w.Self(name, identity, MAP), wire, port=port)

    def source(self, lease_id: str = "lease") -> Source:
        return Source(self.name, *self.worker.address, lease_id, 40)

    def next(self, seconds: float = 10.0) -> list[Report]:
        """What is reported next."""
        select.select([self.worker.fileno()], [], [], seconds)
        return self.worker.poll()

    def close(self) -> None:
        self.worker.close()
        self.arena.close()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    prefiller, decoder = Side("prefiller", 1), Side("decoder", 2)
    yield prefiller, decoder
    decoder.close()
    prefiller.close()


OFFER = Offer("lease", 40, b"digest", (3, 5, 4), 7, 60.0)


def order(source: Source, seconds: float = 10.0) -> Fetch:
    return Fetch(1, source, b"digest", 1, (8, 9), 20, seconds)


def test_a_fetch_moves_what_was_asked_for_and_nothing_else(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    before = decoder.arena.data.clone()
    prefiller.worker.offer(OFFER)
    decoder.worker.fetch(order(prefiller.source()))
    assert decoder.next() == [Arrived(1)]
    for ours, theirs in ((8, 5), (9, 4)):  # page 0 was known
        assert torch.equal(decoder.arena.page(ours), prefiller.arena.page(theirs))
        before[ours * PAGE_BYTES : (ours + 1) * PAGE_BYTES] = prefiller.arena.page(theirs)
    state = slice(20 * GEOMETRY.state_stride, 20 * GEOMETRY.state_stride + STATE_BYTES)
    before[state] = prefiller.arena.state(7)
    assert torch.equal(decoder.arena.data, before)
    decoder.worker.release(prefiller.source())
    assert prefiller.next() == [Returned("lease", "released")]


def test_a_lease_that_is_over_cannot_be_read(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    prefiller.worker.offer(OFFER)
    prefiller.worker.withdraw("lease")
    decoder.worker.fetch(order(prefiller.source()))
    [report] = decoder.next()
    assert isinstance(report, Broken)
    assert "not kept there any more" in report.reason


def test_what_was_read_is_worth_nothing_if_the_lease_ended_meanwhile(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    original = SharedMemoryWire._copy

    def copy_late(wire: SharedMemoryWire, *arguments: object) -> None:
        original(wire, *arguments)  # type: ignore[arg-type]
        prefiller.worker.withdraw("lease")

    decoder.worker.wire._copy = copy_late.__get__(decoder.worker.wire)  # type: ignore[attr-defined]
    prefiller.worker.offer(OFFER)
    decoder.worker.fetch(order(prefiller.source()))
    [report] = decoder.next()
    assert isinstance(report, Broken)


def test_a_lease_is_kept_for_its_reader_beyond_its_time(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    prefiller.worker.offer(replace(OFFER, seconds=0.2))
    decoder.worker.keep([prefiller.source()], 5.0)
    assert prefiller.next(0.6) == []
    decoder.worker.fetch(order(prefiller.source()))
    assert decoder.next() == [Arrived(1)]
    decoder.close()
    assert prefiller.next() == [Returned("lease", "lost")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": b"other"}, "keeps another prompt"),
        ({"source": "another engine"}, "another engine"),
        ({"source": "nobody"}, "Connect call failed"),
    ],
)
def test_what_does_not_fit_is_not_read(sides: tuple[Side, Side], changes: dict, message: str) -> None:
    prefiller, decoder = sides
    prefiller.worker.offer(OFFER)
    source = prefiller.source()
    if changes.get("source") == "another engine":
        source = replace(source, engine_id="the one before")
    elif changes.get("source") == "nobody":
        with socket.create_server(("127.0.0.1", 0)) as free:
            source = replace(source, port=free.getsockname()[1])
    before = decoder.arena.data.clone()
    decoder.worker.fetch(replace(order(source), digest=changes.get("digest", b"digest")))
    [report] = decoder.next()
    assert isinstance(report, Broken)
    assert message in report.reason
    assert torch.equal(decoder.arena.data, before)


def test_engines_that_compute_other_bits() -> None:
    prefiller, decoder = Side("prefiller", 1, identity="int8"), Side("decoder", 2, identity="int4")
    try:
        prefiller.worker.offer(OFFER)
        decoder.worker.fetch(order(prefiller.source()))
        [report] = decoder.next()
        assert isinstance(report, Broken)
        assert "'int4' there, 'int8' here" in report.reason
    finally:
        decoder.close()
        prefiller.close()


@contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """Something that listens, and says ``answer`` to whatever it hears (None: nothing, ever)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            connection, _ = server.accept()
            held.append(connection)
            connection.recv(65536)
            if answer is not None:
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        socket.create_connection(server.getsockname()).close()  # in case nobody came
        thread.join(5)
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "has not answered within 0.3 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no connector of plait"),
        (w.frame(w.Stands(1)), "does not speak plait's protocol"),
        (b"\x04\x00\x00\x00\xff\xff\xff\xff", "does not speak plait's protocol"),
        (w.frame(w.Welcome(99, "prefiller", "same", MAP, {})), "version 99"),
        (w.frame(w.Welcome(1, "prefiller", "same", MAP, {"kind": "rays"})), "not reached by the loopback"),
        (
            w.frame(
                w.Welcome(
                    1, "prefiller", "same", MAP,
                    {"kind": "shared memory", "process": 1, "descriptor": 0, "bytes": 5},
                )
            ),
            "/proc/1/fd/0",
        ),
    ],
    ids=["silent", "http", "wrong word", "garbage", "version", "wire", "another file"],
)  # fmt: skip
def test_strangers_end_a_fetch_and_write_nothing(
    sides: tuple[Side, Side], answer: bytes | None, message: str
) -> None:
    _, decoder = sides
    before = decoder.arena.data.clone()
    with stranger(answer) as port:
        source = Source("prefiller", "127.0.0.1", port, "lease", 40)
        started = time.monotonic()
        decoder.worker.fetch(order(source, seconds=0.3 if answer is None else 20.0))
        [report] = decoder.next()
        assert isinstance(report, Broken)
        assert message in report.reason
        assert time.monotonic() - started < 5
    assert torch.equal(decoder.arena.data, before)


def test_a_host_survives_nonsense(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x03\x00\x00\x00abc", w.frame(w.Release("lease"))):
        with socket.create_connection(prefiller.worker.address) as connection:
            connection.sendall(nonsense)
            assert connection.recv(10) == b""  # it hangs up
    prefiller.worker.offer(OFFER)
    decoder.worker.fetch(order(prefiller.source()))
    assert decoder.next() == [Arrived(1)]


def test_a_fetch_that_waits_for_an_answer_ends_at_once_when_it_is_given_up(sides: tuple[Side, Side]) -> None:
    _, decoder = sides
    with stranger(None) as port:
        decoder.worker.fetch(order(Source("prefiller", "127.0.0.1", port, "lease", 40), seconds=60.0))
        decoder.worker.abandon(1)
        [report] = decoder.next()
        assert report == Broken(1, "nobody waits for it any more")
