"""Results as tables, and as a document."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from plait import __version__
from plait.eval.run import Answered, Score, scores
from plait.eval.statistics import Paired

SCHEMA = "plait.eval/1"


def score_table(found: Sequence[Score], minima: dict[str, float]) -> Table:
    """Kinds with their accuracies; where there is a minimum, whether it was reached."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("kind")
    for heading in ("questions", "right", "accuracy", "95% interval"):
        table.add_column(heading, justify="right")
    if minima:
        table.add_column("at least", justify="right")
    if any(score.errors for score in found):
        table.add_column("errors", justify="right")
    for score in found:
        low, high = score.interval
        row: list[str | Text] = [
            Text(score.kind),
            str(score.count),
            str(score.right),
            f"{score.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}",
        ]
        if minima:
            least = minima.get(score.kind)
            missed = least is not None and score.accuracy < least
            shown = "" if least is None else f"{least:.3f}, missed" if missed else f"{least:.3f}"
            row.append(Text(shown, style="red" if missed else ""))
        if any(score.errors for score in found):
            row.append(str(score.errors))
        table.add_row(*row)
    return table


def paired(first: Sequence[Answered], second: Sequence[Answered]) -> dict[str, Paired]:
    """By kind, and "all" if there are several: the questions that both were asked."""
    theirs = {answer.question.id: answer for answer in second}
    both = [(one, theirs[one.question.id]) for one in first if one.question.id in theirs]
    kinds = list(dict.fromkeys(one.question.kind for one, _ in both))
    found = {
        kind: Paired.of(
            [one.right for one, _ in both if one.question.kind == kind],
            [other.right for one, other in both if one.question.kind == kind],
        )
        for kind in kinds
    }
    if len(kinds) > 1:
        found["all"] = Paired.of([one.right for one, _ in both], [other.right for _, other in both])
    return found


def paired_table(names: tuple[str, str], found: dict[str, Paired], same: int) -> Table:
    """``same``: questions to which both gave the same answer, word for word."""
    count = (found.get("all") or next(iter(found.values()))).count
    table = Table(box=box.SIMPLE_HEAD, caption=f"{same} of {count} answers are the same, word for word")
    for heading in ("kind", "questions", "only A right", "only B right", "B less A", "p (McNemar)"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, pair in found.items():
        counts = (str(pair.count), str(pair.first_only), str(pair.second_only))
        table.add_row(Text(kind), *counts, f"{pair.difference:+.3f}", f"{pair.p:.2g}")
    table.title = Text(f"A: {names[0]}   B: {names[1]}")
    return table


def side(name: str, answers: Sequence[Answered], seconds: float) -> dict[str, Any]:
    """What one configuration answered."""
    return {
        "name": name,
        "seconds": round(seconds, 3),
        "scores": [score.to_dict() for score in scores(answers)],
        "answers": [answer.to_dict() for answer in answers],
    }


def document(
    settings: dict[str, Any], sides: list[dict[str, Any]], pairs: dict[str, Paired]
) -> dict[str, Any]:
    """The whole result, as JSON may hold it."""
    return {
        "schema": SCHEMA,
        "plait": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": platform.machine(),
        "settings": settings,
        "sides": sides,
        "paired": {
            kind: {
                "count": pair.count, "first_only": pair.first_only, "second_only": pair.second_only,
                "difference": pair.difference, "p": pair.p,
            }
            for kind, pair in pairs.items()
        },
    }  # fmt: skip
