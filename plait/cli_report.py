"""What the command line prints besides answers: stages, decisions, errors. All of it on standard error."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from plait.engine.async_engine import EngineInfo
    from plait.engine.explain import Explanation

_console = Console(stderr=True, highlight=False, soft_wrap=True)


def note(line: str) -> None:
    """One line about what goes on."""
    _console.print(Text(line, style="dim"))


def murmur(text: str) -> None:
    """A piece of text of lesser weight, as it comes."""
    _console.print(Text(text, style="dim"), end="")


def fail(message: str) -> None:
    """The one message of a command that ends for a reason the user can mend."""
    _console.print(Text.assemble(("error: ", "bold red"), message))


class Stages:
    """Prints each stage of loading with the time it took; shows the one under way on a terminal."""

    def __init__(self, model: str):
        self._model = model
        self._start = self._since = time.monotonic()
        self._stage: str | None = None
        self._status: Status | None = None

    def __enter__(self) -> Stages:
        _console.print(Text.assemble(("plait ", "bold"), self._model))
        return self

    def __exit__(self, *_: object) -> None:
        self.end(completed=False)

    def __call__(self, stage: str) -> None:
        if self._stage is not None and self._stage.startswith(stage.partition(":")[0]):
            if self._status is not None:  # "loading weights: 12 of 272": news of the stage under way
                self._status.update(stage)
            return
        self.end()
        self._stage, self._since = stage, time.monotonic()
        if _console.is_terminal:
            self._status = _console.status(stage)
            self._status.start()

    def end(self, completed: bool = True) -> None:
        """The stage under way is over, or, if not ``completed``, given up."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._stage is not None and completed:
            _console.print(f"{time.monotonic() - self._since:7.2f} s  {self._stage}", markup=False)
        self._stage = None

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start


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
    for decision in (*info.decisions, *more):
        _console.print(f"  • {decision}", markup=False)
    ready = f"ready after {stages.seconds:.1f} s: {info.model} at {url}/v1, engine process {info.pid}"
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
