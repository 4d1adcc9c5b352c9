"""What the command line prints besides answers: stages, decisions, errors. All of it on standard error."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from plait.logs import structured

if TYPE_CHECKING:
    from plait.engine.async_engine import EngineInfo
    from plait.engine.explain import Explanation

log = logging.getLogger(__name__)

_console = Console(stderr=True, highlight=False, soft_wrap=True)


def note(line: str) -> None:
    """One line about what goes on."""
    if structured():
        log.info("%s", line)
        return
    _console.print(Text(line, style="dim"))


def murmur(text: str) -> None:
    """A piece of text of lesser weight, as it comes."""
    _console.print(Text(text, style="dim"), end="")


def fail(message: str) -> None:
    """The one message of a command that ends for a reason the user can mend."""
    if structured():
        log.error("%s", message)
        return
    _console.print(Text.assemble(("error: ", "bold red"), message))


class Stages:
    """Prints each stage of loading with the time it took; shows the one under way on a terminal, with a bar
    where its length is known. Where logs are JSON, stages are lines of the log."""

    def __init__(self, model: str):
        self._model = model
        self._start = self._since = time.monotonic()
        self._stage: str | None = None
        self._bar: Progress | None = None

    def __enter__(self) -> Stages:
        if not structured():
            _console.print(Text.assemble(("plait ", "bold"), self._model))
        return self

    def __exit__(self, *_: object) -> None:
        self.end(completed=False)

    def __call__(self, stage: str) -> None:
        name, _, news = stage.partition(":")
        if self._stage is not None and self._stage.startswith(name):
            self._show(stage, news)  # "loading weights: 12 of 272 tensors": news of the stage under way
            return
        self.end()
        self._stage, self._since = stage, time.monotonic()
        if _console.is_terminal and not structured():
            columns = (SpinnerColumn(), TextColumn("{task.description}"), _KnownBar(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=_console, transient=True)
            self._bar.add_task(stage, total=None)
            self._bar.start()

    def _show(self, stage: str, news: str) -> None:
        if self._bar is None:
            return
        self._bar.update(self._bar.task_ids[0], description=stage)
        if counts := re.search(r"(\d+) of (\d+)", news):
            self._bar.update(self._bar.task_ids[0], completed=int(counts[1]), total=int(counts[2]))

    def end(self, completed: bool = True) -> None:
        """The stage under way is over, or, if not ``completed``, given up."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._stage is not None and completed:
            seconds = time.monotonic() - self._since
            if structured():
                fields = {"stage": self._stage, "seconds": round(seconds, 3)}
                log.info("%s: %.2f s", self._stage, seconds, extra={"fields": fields})
            else:
                _console.print(f"{seconds:7.2f} s  {self._stage}", markup=False)
        self._stage = None

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start


class _KnownBar(BarColumn):
    """A bar once it is known how long it is."""

    def render(self, task: Task) -> Any:
        return Text("") if task.total is None else super().render(task)


class Download:
    """A progress bar for downloads, on a terminal."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=_console,
            disable=not _console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Download:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what)
        self._bar.update(self._tasks[what], completed=done, total=total or None)


def show_ready(stages: Stages, info: EngineInfo, url: str, more: Sequence[str] = ()) -> None:
    """The summary that ``plait serve`` prints once it takes requests."""
    stages.end()
    decisions = (*info.decisions, *more)
    ready = f"ready after {stages.seconds:.1f} s: {info.model} at {url}/v1, engine process {info.pid}"
    if structured():
        fields = {"decisions": decisions, "url": url, "model": info.model, "engine_pid": info.pid}
        log.info("%s", ready, extra={"fields": fields})
        return
    for decision in decisions:
        _console.print(f"  • {decision}", markup=False)
    _console.print(Text(ready, style="bold green"))


def show_explanation(explanation: Explanation, as_json: bool) -> None:
    """Print what ``plait explain`` found, on standard output."""
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=2))
        return
    console = Console(highlight=False)
    for title, decisions in explanation.sections:
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("setting", no_wrap=True)
        table.add_column("value")
        table.add_column("why", style="dim")
        for decision in decisions:
            table.add_row(Text(decision.name), Text(decision.value), Text(decision.reason))
        console.print(table)
