"""``plait eval``: statistics, extraction of answers, and judging; without a model."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from plait.eval import dataset, report
from plait.eval.command import kinds_named, minima_named
from plait.eval.kinds import KINDS
from plait.eval.question import Question, Said, call_of, held_out
from plait.eval.run import Answered, ask_all, scores
from plait.eval.statistics import Paired, wilson
from plait.eval.targets import Asking

# -- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, count: int, low: float, high: float):
    assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)


@settings(deadline=None)
@given(st.integers(1, 2000), st.data())
def test_wilson_solves_its_equation(count: int, data: st.DataObject):
    """At its ends the share lies 1.96 standard errors, of the end itself, from what was seen."""
    right = data.draw(st.integers(0, count))
    low, high = wilson(right, count)
    seen = right / count
    assert 0 <= low <= seen <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(seen - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), rel=1e-4)


def test_no_share_of_nothing():
    for right, count in ((0, 0), (3, 2), (-1, 5)):
        with pytest.raises(ValueError, match="is no share"):
            wilson(right, count)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 9))
def test_mcnemar_counts_outcomes(first: int, second: int):
    """Against all outcomes of as many fair coins."""
    differing = first + second
    uneven = abs(first - second)
    as_uneven = sum(
        abs(2 * sum(coins) - differing) >= uneven for coins in itertools.product((0, 1), repeat=differing)
    )
    assert Paired(20, first, second).p == pytest.approx(as_uneven / 2**differing)


def test_mcnemar_of_many_pairs_does_not_overflow():
    assert Paired(10_000, 5_000, 5_000).p == 1
    assert Paired(10_000, 0, 5_000).p == 0  # below the smallest float
    assert 0 < Paired(100, 0, 11).p < 0.001 < Paired(100, 0, 10).p


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_pairs_are_counted(pairs: list[tuple[bool, bool]]):
    found = Paired.of([a for a, _ in pairs], [b for _, b in pairs])
    assert found.first_only == pairs.count((True, False))
    assert found.second_only == pairs.count((False, True))
    assert found.count == len(pairs)


# -- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.", 7),
        ("The answer is $1,234.50.", "1234.5"),
        ("10 minus 12 is -2", -2),
        ("first 5, then #### 6, of 7", 6),
        ("#### 18\nChecked: 3 times.", 18),
        ("#### $ 1,000", 1000),
        ("It costs 50% of 20", 20),
        ("3.", 3),
        ("half is .5", ".5"),
        ("no number at all", None),
        ("", None),
    ],
)
def test_numbers_of_answers(text: str, number: Any):
    assert dataset.number_of(text) == (None if number is None else Decimal(number))


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9))
def test_a_number_is_found_however_it_is_written(number: int):
    for text in (f"#### {number}", f"so {number:,}.", f"it is {number}", f"1 + 1, hence {number}.00"):
        assert dataset.number_of(text) == number


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_questions_of_a_file(tmp_path: Path):
    path = jsonl(
        tmp_path / "grade.jsonl",
        {"question": "2 + 2?", "answer": "Two and two.\n#### 4", "more": 1},
        "\n",
        {"question": "Say hi.", "answer": "hi"},
    )
    sums, words = dataset.read(path)
    assert (sums.id, sums.kind, sums.wanted) == ("grade/1", "grade", "4")
    assert sums.messages == [{"role": "user", "content": "2 + 2?"}]
    assert sums.right(Said("I think it is 4."))
    assert not sums.right(Said("I think it is 4, or 5."))
    assert not Answered(sums, Said("4", error="gone")).right
    assert words.right(Said(" hi\n"))
    assert not words.right(Said("hi there"))
    assert [question.id for question in dataset.read(path, 1)] == ["grade/1"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{oops\n", "line 2: each line must be"),
        ({"question": "2?"}, "line 2: each line must be"),
        ({"question": 2, "answer": "2"}, "must be text"),
        ("[1, 2]\n", "line 2: each line must be"),
        ({"question": "2?", "answer": "#### two"}, "there must be a number"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, line: Any, fault: str):
    with pytest.raises(ValueError, match=fault):
        dataset.read(jsonl(tmp_path / "bad.jsonl", {"question": "1?", "answer": "1"}, line))


def test_an_empty_file_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no questions"):
        dataset.read(jsonl(tmp_path / "none.jsonl", "\n"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_answer_is_right_and_others_are_not(kind: str):
    [first, second] = held_out(kind, 2, seed=3)
    wanted = {question.id: question for question in (first, second)}
    assert len(wanted) == 2
    for question in (first, second):
        for other in held_out(kind, 40, seed=4):
            said = _perfect(other)
            assert question.right(said) == (other.wanted == question.wanted)
        assert question.right(_perfect(question))
        assert not question.right(Said())
        assert not question.right(Said(_perfect(question).content + " or so", _perfect(question).calls))


def _perfect(question: Question) -> Said:
    """An answer made from the text that is expected."""
    if not question.kind.startswith("calls"):
        return Said(f" {question.wanted} ")
    name, arguments = question.wanted.removesuffix(")").split("(", 1)
    return Said("", (call_of(name, arguments),))


def test_calls_are_compared_by_value():
    assert call_of("f", '{"a": 1, "b": "x"}') == call_of("f", {"b": "x", "a": 1})
    assert call_of("f", "") == call_of("f", {})
    assert call_of("f", '{"a": 1}') != call_of("f", {"a": "1"})
    assert call_of("f", '{"a": ') == ("f", '{"a": ')  # cut off: no JSON, and no other call


# -- asking -------------------------------------------------------------------------------------


class Parrot:
    """Answers each question with its last message, after questions asked later; counts how many at a time."""

    name = "parrot"

    def __init__(self, together: int):
        self.seeds: dict[str, int] = {}
        self.now = self.most = 0
        self._full = asyncio.Event()
        self._together = together

    async def ask(self, question: Question, asking: Asking, seed: int) -> Said:
        self.seeds[question.id] = seed
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self._together:
            self._full.set()
        await self._full.wait()
        self.now -= 1
        return Said(question.messages[-1]["content"])

    async def close(self) -> None: ...


def _questions(count: int) -> list[Question]:
    def question(i: int) -> Question:
        ask = [{"role": "user", "content": str(i)}]
        return Question(str(i), f"kind {i % 2}", ask, str(i), lambda said: int(said.content) == i)

    return [question(i) for i in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_questions_are_asked_some_at_a_time(concurrency: int):
    parrot = Parrot(min(concurrency, 10))
    seen: list[str] = []
    answers = asyncio.run(
        ask_all(parrot, _questions(10), Asking(seed=7), concurrency, lambda a: seen.append(a.question.id))
    )
    assert parrot.most == min(concurrency, 10)
    assert [answer.question.id for answer in answers] == [str(i) for i in range(10)]
    assert sorted(seen, key=int) == [str(i) for i in range(10)]
    assert all(answer.right for answer in answers)
    assert parrot.seeds == {str(i): 7 + i for i in range(10)}


def test_scores_and_pairs_by_kind():
    questions = _questions(6)
    first = [Answered(q, Said(q.wanted)) for q in questions]
    second = [Answered(q, Said("99") if i < 3 else Said(q.wanted)) for i, q in enumerate(questions)]
    second[5] = Answered(questions[5], Said(error="gone"))
    assert [(s.kind, s.right, s.count, s.errors) for s in scores(second)] == [
        ("kind 0", 1, 3, 0),
        ("kind 1", 1, 3, 1),
    ]
    pairs = report.paired(first, second)
    assert {kind: (p.first_only, p.second_only) for kind, p in pairs.items()} == {
        "kind 0": (2, 0),
        "kind 1": (2, 0),
        "all": (4, 0),
    }
    document = report.document({}, [report.side("a", first, 1.0), report.side("b", second, 1.0)], pairs)
    assert json.loads(json.dumps(document))["paired"]["all"]["difference"] == pytest.approx(-4 / 6)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.score_table(scores(second), {"kind 0": 0.5}))
    console.print(report.paired_table(("x", "y"), pairs, 2))
    shown = console.export_text()
    assert "0.500, missed" in shown
    assert "2 of 6 answers are the same" in shown


# -- flags --------------------------------------------------------------------------------------


def test_kinds_of_a_flag():
    assert kinds_named(None, has_data=False) == kinds_named("all", has_data=True) == tuple(KINDS)
    assert kinds_named(None, has_data=True) == ()
    assert kinds_named("sums, words", has_data=False) == ("sums", "words")
    with pytest.raises(ValueError, match="no kind 'poems'"):
        kinds_named("sums,poems", has_data=False)


def test_minima_of_a_flag():
    assert minima_named(None, ["a", "b"]) == {}
    assert minima_named("0.9", ["a", "b"]) == {"a": 0.9, "b": 0.9}
    assert minima_named("0.5, b=0.75", ["a", "b"]) == {"a": 0.5, "b": 0.75}
    for text, fault in (("c=0.5", "not asked"), ("1.5", "write a share"), ("a=x", "write a share")):
        with pytest.raises(ValueError, match=fault):
            minima_named(text, ["a", "b"])
