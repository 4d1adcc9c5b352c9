"""The same requests under a covering array of settings: every answer equals the quiet run's, bit for bit.

The quiet run answers one request after the other, in whole prompts, with nothing cached. Within one numerics
id (weights, formats) everything else must be invisible: tokens, log-probabilities, texts, reasons to end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import covering
import pytest
from checkpoints import VOCAB
from differential import (
    LONG,
    NUMERICS,
    SCHEDULE,
    SHORT,
    SHORT_NUMERICS,
    Engines,
    label,
    no_numerics,
    numerics,
    numerics_name,
    play,
    quiet_run,
    start,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic import Ask, Said, requests, tokenizer

from plait.core.plan import Kind
from plait.kernels.cpu.native import MISSING, native
from plait.worker.arena import Arena

needs_kernels = pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}")


class Suite:
    """Requests, and their quiet answers by numerics id."""

    def __init__(self, scratch: Path, count: int, longest: int, answer: int) -> None:
        self.scratch = scratch
        self.asks: list[Ask] = requests(count, longest, answer)
        self.quiet = functools.cache(self._quiet)

    def _quiet(self, name: str) -> tuple[list[Said], list[list[int]]]:
        return quiet_run(self.formats(name), self.asks, self.scratch)

    def formats(self, name: str) -> Mapping[str, str]:
        short = {numerics_name(row): row for row in SHORT_NUMERICS}
        return (short | numerics())[name]

    def compare(self, row: Mapping[str, str]) -> None:
        want, prompts = self.quiet(row["numerics"])
        longest = max(len(p) + (a.params.max_tokens or 0) for p, a in zip(prompts, self.asks, strict=True))
        engines = start(row, self.formats(row["numerics"]), longest, self.scratch)
        try:
            got = play(engines, self.asks, prompts, row["arrival"])
            for i, (ask, ours, quiet) in enumerate(zip(self.asks, got, want, strict=True)):
                same(ask, ours, quiet, f"request {i}, prompt of {len(prompts[i])} tokens")
            held_nothing(engines)
            did_what_it_says(engines, row, got)
        finally:
            engines.close()


def same(ask: Ask, got: Said, want: Said, what: str) -> None:
    """Equal; or, where the client hung up, equal as far as it listened."""
    heard = len(got.tokens) if ask.hang_up is not None and got.reason == "abort" else None
    if heard is not None:
        assert heard >= min(ask.hang_up or 0, len(want.tokens)), what
        assert want.text.startswith(got.text), what
    else:
        assert (got.text, got.reason, got.stop) == (want.text, want.reason, want.stop), what
    assert got.tokens == want.tokens[:heard], what
    assert got.logprobs == want.logprobs[:heard], what
    if got.tokens:
        assert got.prompt_logprobs == want.prompt_logprobs, what


def held_nothing(engines: Engines) -> None:
    for core in engines.cores:
        core.flush()  # what is being written to the disk is held until it is there
        usage = core.scheduler.cache.usage()
        assert usage["pages_used"] == usage["states_used"] == 0
        assert not core.scheduler.requests


def did_what_it_says(engines: Engines, row: Mapping[str, str], got: list[Said]) -> None:
    """A row in which nothing was preempted or found would prove little."""
    counters = engines.decoder.scheduler.counters
    if row["preemption"] == "ample":
        assert counters.preemptions == 0
    elif row["sequences"] != "3" and row.get("hand-over") != "on":
        assert counters.preemptions > 0  # three requests may fit, whatever their lengths
    cached = sum(said.cached for said in got)
    assert (cached > 0) == (row["prefix cache"] != "off")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    if native is not None:
        native.set_threads(1)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("short"), count=40, longest=300, answer=14)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("long"), count=200, longest=3000, answer=24)


@needs_kernels
@pytest.mark.parametrize("row", SHORT, ids=label)
def test_answers_of_the_short_array(short: Suite, row: dict[str, str]) -> None:
    short.compare(row)


@needs_kernels
@pytest.mark.parametrize("kind", [Kind.STATE, Kind.PAGE])
def test_one_copy_left_out_is_noticed(short: Suite, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: a snapshot that is not restored, a page of a leaf that is not copied."""
    rows = [
        row
        for row in SHORT
        if row["numerics"].startswith("qwen3_5 ") and row["prefix cache"] in ("on", "on disk")
    ]
    real = Arena.copy

    def copy(self: Arena, what: Kind, source: int, target: int) -> None:
        if what != kind:
            real(self, what, source, target)

    def is_noticed(row: dict[str, str]) -> bool:
        try:
            short.compare(row)
        except AssertionError as difference:
            return "request" in str(difference)
        return False

    for row in rows:  # their quiet runs are made with copies in order
        short.quiet(row["numerics"])
    monkeypatch.setattr(Arena, "copy", copy)
    assert any(is_noticed(row) for row in rows)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("row", LONG, ids=label)
def test_answers_of_the_long_array(long: Suite, row: dict[str, str]) -> None:
    long.compare(row)


@needs_kernels
def test_quiet_answers_are_of_every_kind(short: Suite) -> None:
    """Else equality would say little."""
    everyone: list[Said] = []
    for name in map(numerics_name, SHORT_NUMERICS):
        said, prompts = short.quiet(name)
        everyone += said
        answers = [tuple(s.tokens) for s in said if len(s.tokens) > 4]
        assert len(set(answers)) == len(answers) > 20
        assert len({token for answer in answers for token in answer}) > 100
        assert {s.reason for s in said} == {"stop", "length"}
        assert min(map(len, prompts)) == 1
    assert sum(isinstance(s.stop, str) for s in everyone) >= 3
    assert any(isinstance(s.stop, int) for s in everyone)
    assert any(s.prompt_logprobs for s in everyone)
    assert len({tuple(s.tokens) for s in everyone}) > len(everyone) / 2  # formats change answers


# -- the requests and the array -----------------------------------------------------------------


def test_requests_are_of_every_kind() -> None:
    asks = requests(200, 3000, 24)
    assert asks == requests(200, 3000, 24)
    lengths = [len(ask.tokens) for ask in asks if ask.after is None]
    assert min(lengths) == 1
    assert max(lengths) == 3000
    assert sum(len(ask.tokens) > 1000 for ask in asks) >= 20
    heads: dict[tuple[int, ...], int] = {}
    for ask in asks:
        if len(ask.tokens) >= 16 and ask.after is None:
            heads[ask.tokens[:16]] = heads.get(ask.tokens[:16], 0) + 1
    sharing = sum(count for count in heads.values() if count > 1) + sum(ask.after is not None for ask in asks)
    assert sharing >= 0.4 * len(asks)
    assert sum(ask.after is not None for ask in asks) >= 20
    assert sum(bool(ask.params.stop_strings) for ask in asks) >= 20
    assert sum(ask.hang_up is not None for ask in asks) >= 10
    assert 60 <= sum(ask.params.temperature == 0 for ask in asks) <= 140
    assert all(0 <= token < VOCAB for ask in asks for token in ask.tokens)
    assert tokenizer().vocab_size == VOCAB


def test_the_long_array_covers_every_pair() -> None:
    assert len(LONG) >= 60
    dimensions = {"numerics": tuple(numerics()), **SCHEDULE}
    assert covering.covered(LONG) >= covering.all_pairs(dimensions)
    # Formats meet among themselves inside the numerics ids, and everything else through them.
    flat = [{**numerics()[row["numerics"]], **row} for row in LONG]
    for row in flat:
        del row["numerics"]
    assert covering.covered(flat) == covering.all_pairs(NUMERICS | SCHEDULE, no_numerics)


def test_the_short_array_covers_every_pair_of_its_own() -> None:
    dimensions = {"numerics": tuple(map(numerics_name, SHORT_NUMERICS)), **SCHEDULE}
    assert covering.covered(SHORT) == covering.all_pairs(dimensions)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(0, 5), st.data())
def test_covering_arrays(sizes: list[int], seed: int, data: st.DataObject) -> None:
    dimensions = {f"d{i}": [str(v) for v in range(n)] for i, n in enumerate(sizes)}
    forbidden = sizes[0] > 1 and data.draw(st.booleans())

    def excluded(a: covering.Value, b: covering.Value) -> str | None:
        # The last value of the first dimension goes with the first value of the second alone.
        last = ("d0", str(sizes[0] - 1))
        return "so it is" if forbidden and a == last and b[0] == "d1" and b[1] != "0" else None

    rows = covering.covering_array(dimensions, excluded=excluded, seed=seed, at_least=4)
    assert rows == covering.covering_array(dimensions, excluded=excluded, seed=seed, at_least=4)
    assert all(list(row) == list(dimensions) for row in rows)
    assert covering.covered(rows) == covering.all_pairs(dimensions, excluded)
    assert len(rows) <= max(4, len(covering.all_pairs(dimensions)))


def test_a_pair_that_fits_nowhere_is_an_error() -> None:
    dimensions = {"a": ["0"], "b": ["0"], "c": ["0", "1"]}

    def excluded(a: covering.Value, b: covering.Value) -> str | None:
        return "never" if a[0] == "c" and b[0] == "a" else None

    with pytest.raises(ValueError, match="fit into no row"):
        covering.covering_array(dimensions, excluded=excluded)
