"""``plait bench``: statistics by hand, arrivals, workloads, measuring, comparing, and what is written."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tiny

from plait.bench.arrivals import Arrivals
from plait.bench.compare import order_of_rounds
from plait.bench.drive import drive
from plait.bench.figures import Figures, by_class
from plait.bench.record import Record
from plait.bench.settings import TrafficArgs
from plait.bench.stats import Summary, paired_ratio, percentile, student_t
from plait.bench.sweep import Sweep, overrides, pareto
from plait.bench.target import Clock, Message
from plait.bench.traffic import Traffic, describe
from plait.bench.workload import Content, Lengths, Session, Turn, conversation, mix, shared_prefix, single
from plait.bench.writers import TokenWriter, WordWriter
from plait.text.tokenizer import Tokenizer

WRITER = TokenWriter(1000, excluded=(0, 7))


# -- statistics -------------------------------------------------------------------------------------


def test_percentiles_lie_between_the_closest_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 90) == pytest.approx(3.7)
    assert percentile([5.0], 99) == 5.0
    values = sorted(np.random.default_rng(1).exponential(size=101).tolist())
    for percent in (50, 90, 95, 99):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_summary() -> None:
    summary = Summary.of([4.0, 1.0, 3.0, 2.0])
    assert summary == Summary(4, 2.5, 2.5, pytest.approx(3.7), pytest.approx(3.85), pytest.approx(3.97), 4.0)
    assert Summary.of([]) is None


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.7062), (5, 2.5706), (10, 2.2281), (15, 2.1314), (30, 2.0423), (200, 1.9719)]
)
def test_student_t(degrees: int, value: float) -> None:
    assert student_t(degrees) == pytest.approx(value, abs=5e-4)


def test_paired_ratio_by_hand() -> None:
    # d = ln 2, ln 2, ln 4: mean (4/3) ln 2, s = ln 2 / sqrt 3; half width t(2) · s / sqrt 3 = 4.3027 ln 2 / 3
    found = paired_ratio([1.0, 2.0, 1.0], [2.0, 4.0, 4.0])
    assert found is not None
    assert found.ratio == pytest.approx(2 ** (4 / 3))
    assert math.log(found.high / found.ratio) == pytest.approx(4.3027 * math.log(2) / 3)
    assert found.low * found.high == pytest.approx(found.ratio**2)
    assert not found.differs
    same = paired_ratio([1.0, 2.0], [2.0, 4.0])
    assert same is not None
    assert same.differs
    assert paired_ratio([1.0], [2.0]) is None
    assert paired_ratio([1.0, 0.0], [2.0, 1.0]) is None


def test_intervals_cover_the_truth_19_times_in_20() -> None:
    random = np.random.default_rng(3)
    hits, trials = 0, 800
    for _ in range(trials):
        a, b = np.exp(random.normal(0, 0.2, size=(2, 5)))
        found = paired_ratio(a.tolist(), (1.5 * b).tolist())
        assert found is not None
        hits += found.low <= 1.5 <= found.high
    assert 0.93 < hits / trials < 0.97


# -- arrivals ---------------------------------------------------------------------------------------


def test_poisson_gaps_are_exponential() -> None:
    times = Arrivals(rate=4.0).times(20_000, seed=5)
    assert times is not None
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)  # an exponential's mean and deviation are equal
    assert (gaps > 0.25).mean() == pytest.approx(math.exp(-1), abs=0.01)
    assert times == Arrivals(rate=4.0).times(20_000, seed=5)
    assert times != Arrivals(rate=4.0).times(20_000, seed=6)


def test_other_arrivals() -> None:
    assert Arrivals(concurrency=3).times(5, seed=1) is None
    assert Arrivals(rate=math.inf).times(3, seed=1) == [0.0, 0.0, 0.0]
    for wrong in ({}, {"rate": 0.0}, {"rate": -1.0}, {"concurrency": 0}):
        with pytest.raises(ValueError, match="--"):
            Arrivals(**wrong)


# -- workloads --------------------------------------------------------------------------------------


def test_lengths_and_seeds() -> None:
    sessions = single(WRITER, Lengths(100, 10, 0.5), 200, seed=1)
    sizes = [len(s.turns[0].content) for s in sessions]
    answers = [s.turns[0].output_len for s in sessions]
    assert (min(sizes), max(sizes)) == (50, 150)
    assert (min(answers), max(answers)) == (5, 15)
    assert single(WRITER, Lengths(100, 10, 0.5), 20, seed=1) == sessions[:20]  # whatever their number
    assert single(WRITER, Lengths(100, 10, 0.5), 20, seed=2) != sessions[:20]
    tokens = {token for s in sessions for token in s.turns[0].content}
    assert max(tokens) < 1000
    assert not tokens & {0, 7}


def test_mix_has_the_share_it_says() -> None:
    for seed in range(5):
        sessions = mix(WRITER, Lengths(16, 4), Lengths(64, 4), 0.3, 20, seed)
        assert [len(s.turns[0].content) for s in sessions if s.label == "long"] == [64] * 6
        assert [len(s.turns[0].content) for s in sessions if s.label == "short"] == [16] * 14
    labels = [[s.label for s in mix(WRITER, Lengths(1, 1), Lengths(2, 1), 0.3, 20, seed)] for seed in (1, 2)]
    assert labels[0] != labels[1]


def test_conversations_and_shared_prefixes() -> None:
    talks = conversation(WRITER, 50, Lengths(10, 5), 3, 4, seed=1)
    assert [len(t.turns) for t in talks] == [3] * 4
    assert len({t.system for t in talks}) == 4
    assert conversation(WRITER, 0, Lengths(10, 5), 3, 1, seed=1)[0].system is None
    shared = shared_prefix(WRITER, 50, Lengths(10, 5), 2, 6, seed=1)
    assert len({s.system for s in shared}) == 2
    assert len({s.turns for s in shared}) == 6
    assert shared[0].system == shared[2].system != shared[1].system


def test_words_make_as_many_tokens_as_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer.load(tiny.save(tiny.byte_level(), tmp_path_factory.mktemp("tokenizer")))
    for length in (1, 17, 300):
        text = WordWriter(tokenizer).write(np.random.default_rng(length), length)
        assert abs(len(tokenizer.encode(text)) - length) <= 2
    assert len(WordWriter().write(np.random.default_rng(0), 40).split()) == 40


def test_runs_get_prompts_of_their_own() -> None:
    args = TrafficArgs(num_prompts=4, random_input_len=20, traffic_seed=1).settled()
    runs = [Traffic.of(args, WRITER, *path) for path in ((), (1,), (2,))]
    prompts = [s.turns[0].content for run in runs for s in (*run.sessions, *run.warm_up)]
    assert len(set(prompts)) == len(prompts) == 3 * (4 + 2)
    assert Traffic.of(args, WRITER, 1) == runs[1]
    unseeded = TrafficArgs().settled()
    assert unseeded.traffic_seed is not None
    assert "closed loop, 1 at a time" in describe(unseeded)
    with pytest.raises(ValueError, match="--profile"):
        TrafficArgs(profile="poem")


# -- driving ----------------------------------------------------------------------------------------


class FakeTarget:
    """Answers after ``seconds``, one request at a time if ``serial``; refuses prompts that begin with 666."""

    name = "fake"

    def __init__(self, seconds: float = 0.0, serial: bool = False) -> None:
        self.seconds = seconds
        self.place = asyncio.Semaphore(1 if serial else 1000)
        self.running = self.most = 0
        self.seen: list[list[Message]] = []

    async def ask(
        self, history: Sequence[Message], output_len: int, record: Record, clock: Clock
    ) -> Content | None:
        self.seen.append(list(history))
        record.sent = clock()
        self.running += 1
        self.most = max(self.most, self.running)
        async with self.place:
            await asyncio.sleep(self.seconds)
        self.running -= 1
        if history[-1].content[0] == 666:
            record.error = "refused"
        else:
            record.chunks = [clock()] * output_len
            record.output_tokens = output_len
        record.ended = clock()
        return None if record.error else (1,) * output_len

    async def prepare(self) -> None: ...

    async def close(self) -> None: ...


def sessions_of(count: int, output_len: int = 2) -> list[Session]:
    return [Session("all", (Turn((i + 1,), output_len),)) for i in range(count)]


def test_closed_loop_keeps_its_concurrency() -> None:
    target = FakeTarget(0.005)
    records = asyncio.run(drive(target, sessions_of(10), Arrivals(concurrency=3)))
    assert len(records) == 10
    assert target.most == 3
    assert all(r.sent - r.scheduled < 0.1 for r in records)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_open_loop_counts_the_wait(concurrency: int | None) -> None:
    """Requests that are due at once and served one by one wait for each other, wherever the queue is."""
    target = FakeTarget(0.02, serial=True)
    records = asyncio.run(drive(target, sessions_of(5), Arrivals(rate=math.inf, concurrency=concurrency)))
    waits = sorted(r.ttft for r in records)
    assert all(wait >= 0.019 * (i + 1) for i, wait in enumerate(waits))
    assert all(r.scheduled == 0.0 for r in records)


def test_turns_send_the_history_again() -> None:
    target = FakeTarget()
    talk = Session("all", (Turn((1, 2), 2), Turn((3,), 1)), system=(9,))
    records = asyncio.run(drive(target, [talk], Arrivals(concurrency=1)))
    assert [r.turn for r in records] == [0, 1]
    assert [m.content for m in target.seen[1]] == [(9,), (1, 2), (1, 1), (3,)]
    assert [m.role for m in target.seen[1]] == ["system", "user", "assistant", "user"]


def test_a_failed_turn_fails_the_rest_of_its_session() -> None:
    target = FakeTarget()
    talk = Session("all", (Turn((666,), 2), Turn((3,), 1)))
    records = asyncio.run(drive(target, [talk, *sessions_of(1)], Arrivals(concurrency=1)))
    assert [r.error for r in records] == ["refused", "an earlier turn failed: refused", None]
    assert len(target.seen) == 2


# -- figures ----------------------------------------------------------------------------------------


def record(**fields: object) -> Record:
    given = {
        "label": "all",
        "turn": 0,
        "scheduled": 1.0,
        "sent": 1.0,
        "chunks": [1.5, 1.7, 2.1],
        "ended": 2.2,
    }
    return Record(**given | {"prompt_tokens": 10, "output_tokens": 4, "cached_tokens": 5} | fields)


def test_figures_by_hand() -> None:
    figures = Figures.of([record(), record(label="b", scheduled=0.5), record(error="no")], duration=4.0)
    assert (figures.completed, figures.failed) == (2, 1)
    assert figures.ttft is not None
    assert figures.ttft.mean == pytest.approx(0.75)  # 0.5 and 1.0, from when it was due
    assert figures.itl is not None
    assert figures.itl.mean == pytest.approx(0.3)  # 0.2 and 0.4
    assert figures.tpot is not None
    assert figures.tpot.p50 == pytest.approx(0.2)  # 0.6 s over 3 tokens
    assert figures.user_speed == pytest.approx(5.0)
    assert figures.e2e is not None
    assert figures.e2e.max == pytest.approx(1.7)
    assert (figures.request_rate, figures.input_rate, figures.output_rate) == (0.5, 5.0, 2.0)
    assert figures.total_rate == 7.0
    assert figures.cached_share == 0.5


def test_figures_without_usage() -> None:
    silent = record(cached_tokens=None, counted_by="chunks", output_tokens=3)
    assert Figures.of([silent], 1.0).cached_share is None
    assert Figures.of([silent], 1.0).token_counts == "chunks"
    assert Figures.of([silent, record()], 1.0).token_counts == "mixed"
    nothing = Figures.of([record(error="no")], 1.0)
    assert nothing.ttft is None
    assert "ttft_p50" not in nothing.metrics()


def test_classes() -> None:
    classes = by_class([record(label="short"), record(label="long"), record(label="short")], 1.0)
    assert {name: f.completed for name, f in classes.items()} == {"all": 3, "long": 1, "short": 2}
    assert list(by_class([record()], 1.0)) == ["all"]


# -- comparing and sweeping -------------------------------------------------------------------------


def test_rounds_are_mirrored_in_pairs() -> None:
    orders = order_of_rounds(2, 40, seed=1)
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert statistics.fmean(order[0] for order in orders[::2]) not in (0.0, 1.0)
    assert orders == order_of_rounds(2, 40, seed=1)
    assert sorted(order_of_rounds(3, 1, seed=2)[0]) == [0, 1, 2]


def test_pareto_curve() -> None:
    assert pareto([(10.0, 10.0), (8.0, 20.0), (7.0, 15.0), (8.0, 18.0), (5.0, 30.0)]) == [
        True, True, False, False, True,
    ]  # fmt: skip


def test_settings_from_text() -> None:
    assert overrides("max_num_seqs=8, enable-prefix-caching=false,target_itl_ms=12.5,memory_limit=2GiB") == {
        "max_num_seqs": 8, "enable_prefix_caching": False, "target_itl_ms": 12.5, "memory_limit": "2GiB",
    }  # fmt: skip
    assert overrides("default") == overrides("") == {}
    assert Sweep.parse("concurrency=1,2") == Sweep("max_concurrency", (1, 2))
    assert Sweep.parse("max_num_batched_tokens=64,512").values == (64, 512)
    assert not Sweep.parse("chunk=64").of_traffic
    for wrong in ("nonsense=1", "max_num_seqs=many", "enable_prefix_caching=perhaps"):
        with pytest.raises(ValueError, match=r"setting|number|true or false"):
            overrides(wrong)
    for wrong in ("concurrency", "concurrency=", "concurrency=two"):
        with pytest.raises(ValueError, match="--over"):
            Sweep.parse(wrong)


def test_traffic_settings_can_be_replaced() -> None:
    args = TrafficArgs(request_rate=2.0, traffic_seed=1).settled()
    assert args.max_concurrency is None
    assert Traffic.of(replace(args, max_concurrency=4), WRITER).arrivals == Arrivals(2.0, 4)
