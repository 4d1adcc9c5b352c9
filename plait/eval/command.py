"""What ``plait eval`` does: asks, shows, writes, and says whether the minima were reached."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plait.bench.sweep import overrides
from plait.cli_report import Stages
from plait.config import EngineArgs
from plait.eval import dataset, report
from plait.eval.kinds import KINDS
from plait.eval.question import Question, held_out
from plait.eval.run import Answered, Score, ask_all, scores
from plait.eval.targets import Asking, EngineTarget, HTTPTarget, Target


@dataclass(frozen=True, slots=True)
class EvalArgs:
    """What is asked, of whom, and what must be reached.

    Args:
        model: as for ``plait serve``; at a URL, as the server calls it (None: the first it lists).
        base_url: of a server; None: an engine is started.
        api_key: sent to the server.
        kinds: held-out kinds to ask.
        items: questions of each kind, and of each file; 0: all of a file.
        data: files of questions.
        concurrency: questions asked at a time.
        minima: least accuracy by kind.
    """

    model: str | None
    base_url: str | None
    api_key: str | None
    kinds: tuple[str, ...]
    items: int
    data: tuple[Path, ...]
    concurrency: int
    minima: dict[str, float]
    asking: Asking


def kinds_named(text: str | None, has_data: bool) -> tuple[str, ...]:
    """The kinds that ``--kinds`` names; by default all, or none beside files.

    Raises:
        ValueError: one that does not exist.
    """
    if text is None:
        return () if has_data else tuple(KINDS)
    if text == "all":
        return tuple(KINDS)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in KINDS:
            raise ValueError(f"--kinds: there is no kind {name!r}; there are {', '.join(KINDS)}, or all")
    return names


def minima_named(text: str | None, kinds: Sequence[str]) -> dict[str, float]:
    """``--min``: "0.9" for all kinds, or "words=0.96,codes=0.9" for some; the former may stand first.

    Raises:
        ValueError: it is not of this form, or names a kind that is not asked.
    """
    found: dict[str, float] = {}
    for part in (text or "").split(","):
        name, equals, value = part.strip().rpartition("=")
        if not value:
            continue
        try:
            least = float(value)
        except ValueError:
            least = -1.0
        if not 0 <= least <= 1:
            raise ValueError(
                f"--min {text!r}: write a share such as 0.9, or kinds with theirs: words=0.96,codes=0.9"
            )
        if equals and name not in kinds:
            raise ValueError(f"--min names {name!r}, which is not asked; asked are {', '.join(kinds)}")
        found |= {name: least} if equals else dict.fromkeys(kinds, least)
    return found


def questions_of(args: EvalArgs) -> list[Question]:
    """All questions that are asked.

    Raises:
        ValueError: two files of one name; else as ``dataset.read``.
    """
    kinds = [*args.kinds, *(path.stem for path in args.data)]
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"there are two kinds or files of the name {twice[0]}; give a file another name")
    made = [question for kind in args.kinds for question in held_out(kind, args.items, args.asking.seed)]
    for path in args.data:
        made += dataset.read(path, args.items or None)
    return made


class Screen:
    """Tables on standard output; progress and notes on standard error."""

    def __init__(self) -> None:
        self.out = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, line: str) -> None:
        self._notes.print(line, style="dim", markup=False)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Any]:
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[right]} right"),
            TimeElapsedColumn(),
            console=self._notes,
            disable=not self._notes.is_terminal,
        )
        task = bar.add_task(what, total=total, right=0)
        right = 0

        def advance(answer: Answered) -> None:
            nonlocal right
            right += answer.right
            bar.update(task, advance=1, right=right)

        with bar:
            yield advance


async def evaluate(args: EvalArgs, engine: EngineArgs | None, output: Path | None) -> bool:
    """Ask one configuration; whether every minimum was reached and every question answered."""
    screen, questions = Screen(), questions_of(args)
    target = await _target(args, args.base_url, engine, screen)
    answers, seconds = await _ask(screen, target, questions, args)
    found = scores(answers)
    screen.out.print(report.score_table(found, args.minima))
    _examples(screen, answers)
    _write(
        screen,
        output,
        report.document(_settings(args, engine), [report.side(target.name, answers, seconds)], {}),
    )
    return _reached(screen, found, args.minima)


async def compare(
    args: EvalArgs, sides: tuple[str, str], engine: EngineArgs | None, output: Path | None
) -> bool:
    """Ask two configurations the same questions, one after the other; as ``evaluate``, of both."""
    screen, questions = Screen(), questions_of(args)
    made, given, well = [], [], True
    for text in sides:
        target = await _side(args, text, engine, screen)
        answers, seconds = await _ask(screen, target, questions, args)
        found = scores(answers)
        screen.out.print(f"{text}:", markup=False)
        screen.out.print(report.score_table(found, args.minima))
        well = _reached(screen, found, args.minima) and well
        made.append(report.side(text, answers, seconds))
        given.append(answers)
    pairs = report.paired(*given)
    same = sum(a.said.shown == b.said.shown for a, b in zip(*given, strict=True))
    screen.out.print(report.paired_table(sides, pairs, same))
    _write(screen, output, report.document(_settings(args, engine), made, pairs))
    return well


async def _side(args: EvalArgs, text: str, engine: EngineArgs | None, screen: Screen) -> Target:
    if text.startswith(("http://", "https://")):
        # Beside an engine of one's own the model's name is that of its files.
        return await _target(args if engine is None else replace(args, model=None), text, None, screen)
    if engine is None:
        raise ValueError(
            f"--paired {text!r}: write URLs, or a model and settings such as default or max_num_seqs=1"
        )
    return await _target(args, None, replace(engine, **overrides(text)), screen)


async def _target(args: EvalArgs, url: str | None, engine: EngineArgs | None, screen: Screen) -> Target:
    if url is not None:
        target = HTTPTarget(url, args.model, args.api_key)
        try:
            await target.connect()
        except BaseException:
            await target.close()
            raise
        return target
    assert engine is not None
    with Stages(engine.model) as stages:
        started = await EngineTarget.start(engine.model, engine, stages)
        stages.end()
    return started


async def _ask(
    screen: Screen, target: Target, questions: Sequence[Question], args: EvalArgs
) -> tuple[list[Answered], float]:
    started = time.monotonic()
    try:
        with screen.progress(target.name, len(questions)) as advance:
            answers = await ask_all(target, questions, args.asking, args.concurrency, advance)
    finally:
        await target.close()
    return answers, time.monotonic() - started


def _examples(screen: Screen, answers: Sequence[Answered], most: int = 3) -> None:
    """The first few wrong answers, so that a low score shows why."""
    wrong = [answer for answer in answers if not answer.right]
    for answer in wrong[:most]:
        screen.note(f"{answer.question.id}: wanted {answer.question.wanted!r}, got {answer.said.shown!r}")
    if len(wrong) > most:
        screen.note(f"and {len(wrong) - most} more wrong answers; --output has them all")


def _reached(screen: Screen, found: Sequence[Score], minima: dict[str, float]) -> bool:
    errors = sum(score.errors for score in found)
    if errors:
        screen.note(f"{errors} questions got no answer, and count as wrong")
    return not errors and all(score.accuracy >= minima.get(score.kind, 0.0) for score in found)


def _write(screen: Screen, output: Path | None, document: dict[str, Any]) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        screen.note(f"wrote {output}")


def _settings(args: EvalArgs, engine: EngineArgs | None) -> dict[str, Any]:
    """Settings without the key."""
    shown = asdict(args) | {"data": [str(path) for path in args.data]}
    shown.pop("api_key")
    return shown | ({"engine": asdict(engine)} if engine is not None else {})
