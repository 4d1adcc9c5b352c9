"""The book of the arena: slabs, kinds, fences, moves; by examples and by random drives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.arena import ArenaBook, IntegrityError
from plait.core.geometry import Geometry
from plait.core.plan import Kind

geometries = st.builds(
    Geometry,
    page_size=st.integers(1, 64),
    page_bytes=st.integers(1, 20).map(lambda n: 64 * n),
    state_bytes=st.integers(0, 9000),
    state_grid=st.sampled_from([1, 16, 64]),
    arena_bytes=st.integers(0, 60_000),
)


@given(geometries)
def test_units_lie_inside_their_slabs(g):
    assert g.num_slabs * g.slab_bytes <= g.arena_bytes
    assert g.slab_bytes % g.page_bytes == 0
    assert g.publish_grid % g.page_size == 0
    if g.has_state:
        assert g.slab_states >= 1
        assert g.state_stride % 64 == 0
        assert g.state_stride >= g.state_bytes
        assert g.slab_states * g.state_stride == g.slab_bytes
        assert g.publish_grid % g.state_grid == 0
    assert g.longest_request() == 0 or g.slabs_for(g.longest_request()) <= g.num_slabs
    assert g.slabs_for(g.longest_request() + 1) > g.num_slabs


@given(geometries, st.lists(st.tuples(st.sampled_from("tgvlec"), st.integers(0, 10**6)), max_size=120))
@settings(max_examples=150)
def test_any_drive_keeps_the_books(g, moves):
    """take, give, vacate, lend, end of loan, complete; the books are recounted after each."""
    book, held, lent, launched = ArenaBook(g), [], [], 0
    for what, number in moves:
        kind = Kind.STATE if g.has_state and number % 3 == 0 else Kind.PAGE
        if what == "t":
            unit = book.take(kind, near=held[-1] if held and held[-1].kind is kind else None)
            if unit is None:
                assert book.free_count[kind] == 0
                assert not book.empty
            else:
                unit.refs = 1
                held.append(unit)
        elif what == "g" and held:
            unit = held.pop(number % len(held))
            unit.refs = 0
            launched += 1
            book.give(unit, launched)
        elif what == "v" and g.has_state:
            before = {id(unit): unit.index for unit in held}
            empty = len(book.empty)
            copies = book.vacate(kind, launched + 1)
            if copies is not None:
                assert len(book.empty) == empty + 1
                moved = {before[id(unit)]: unit.index for unit in held if before[id(unit)] != unit.index
                         and unit.kind is kind}  # fmt: skip
                assert moved == {copy.source: copy.target for copy in copies}
        elif what == "l":
            unit = book.lend(kind)
            if unit is not None:
                assert book._is_over(kind, unit.index)
                lent.append(unit)
        elif what == "e" and lent:
            unit = lent.pop(number % len(lent))
            book.end_loan(unit)
            book.give(unit, launched)
        elif what == "c":
            book.complete(launched)
        book.check()
    spans = sorted(_span(g, unit) for unit in [*held, *lent])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "units overlap"


def _span(g, unit):
    if unit.kind is Kind.PAGE:
        return (unit.index * g.page_bytes, (unit.index + 1) * g.page_bytes)
    return (unit.index * g.state_stride, unit.index * g.state_stride + g.state_bytes)


def test_a_lent_unit_is_past_its_fence():
    book = ArenaBook(Geometry(16, 64, 64, 1, 64))
    unit = book.take(Kind.PAGE)
    book.give(unit, fence=3)
    assert book.fenced_pages() == 1
    assert book.lend(Kind.PAGE) is None
    assert book.lend(Kind.STATE) is None, "the fence holds whatever the slab's kind"
    book.complete(3)
    assert book.fenced_pages() == 0
    assert book.lend(Kind.STATE) is not None


def test_memory_behind_a_fence_is_the_workers_at_once():
    book = ArenaBook(Geometry(16, 64, 0, 1, 64))
    unit = book.take(Kind.PAGE)
    book.give(unit, fence=3)
    assert book.take(Kind.PAGE) is not None


def test_mistakes_are_noticed():
    book = ArenaBook(Geometry(16, 64, 0, 1, 640))
    unit = book.take(Kind.PAGE)
    unit.refs = 1
    with pytest.raises(IntegrityError, match="while it is held"):
        book.give(unit, 0)
    unit.refs = 0
    with pytest.raises(IntegrityError, match="a leak"):
        book.check()
    book.give(unit, 0)
    with pytest.raises(IntegrityError, match="double free"):
        book.give(unit, 0)
    with pytest.raises(IntegrityError, match="not on"):
        book.end_loan(unit)


def test_pages_come_from_the_fullest_slab_and_stay_together():
    book = ArenaBook(Geometry(16, 64, 256, 1, 256 * 4))
    first = [book.take(Kind.PAGE) for _ in range(3)]
    assert {unit.index // 4 for unit in first} == {first[0].index // 4}
    fourth, fifth = book.take(Kind.PAGE), book.take(Kind.PAGE)
    assert fourth.index // 4 == first[0].index // 4
    assert fifth.index // 4 != first[0].index // 4
    assert book.take(Kind.PAGE, near=fifth).index // 4 == fifth.index // 4
