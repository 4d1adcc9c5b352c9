"""A progress bar for loading weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plait.models.weights import Progress


@contextmanager
def progress_bar(title: str = "Loading weights") -> Iterator[Progress]:
    """Shows how many tensors were read, on standard error; give what it yields to ``load_model``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
