"""``plait bench kernels``: each kernel against this machine's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.bench.cases import (
    Case,
    attention_cases,
    delta_cases,
    linear_cases,
    row_cases,
    sampling_cases,
)
from plait.bench.ceilings import Ceiling, Roofline, measure_ceilings
from plait.bench.run import document
from plait.bench.shapes import config_of
from plait.bench.step_share import StepShare, measure_step
from plait.bench.timing import fastest, use_threads
from plait.kernels.backend import Backend
from plait.kernels.registry import get_backend
from plait.models.config import ModelConfig

GROUPS: dict[str, Callable[[Backend, ModelConfig], Iterator[Case]]] = {
    "linear": linear_cases,
    "attention": attention_cases,
    "delta": delta_cases,
    "rows": row_cases,
    "sampling": lambda backend, config: sampling_cases(config),
}
STEP = "step"
"""The group that measures whole decode steps."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. ``share``: the least time the ceilings allow / the time taken; None: no ceiling."""

    kernel: str
    case: str
    microseconds: float
    rate: float
    unit: str
    bound: str
    share: float | None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def time_case(case: Case, roofline: Roofline, seconds: float) -> Row:
    """Time one case for about ``seconds``."""
    taken = fastest(case.call, seconds)
    scale = 1e9 if case.unit.startswith("G") else 1.0
    unit = {"GFLOP": "GFLOP/s", "GB": "GB/s"}.get(case.unit, f"{case.unit}/s")
    bound, share = "", None
    if case.moved:
        bound = roofline.bound(case.moved, case.operations)
        share = roofline.seconds(case.moved, case.operations) / taken
    return Row(case.kernel, case.case, taken * 1e6, case.amount / taken / scale, unit, bound, share)


def bench_kernels(
    shape: str, backend_name: str, groups: Sequence[str], threads: int, seconds: float, console: Console
) -> dict[str, Any]:
    """Measure ceilings, then the groups of kernels; prints tables and returns the result document.

    Raises:
        ValueError: an unknown shape, backend or group.
    """
    unknown = [group for group in groups if group not in (*GROUPS, STEP)]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: choose from {', '.join((*GROUPS, STEP))}")
    backend, config = get_backend(backend_name, "cpu"), config_of(shape)
    rows: list[Row] = []
    steps: list[StepShare] = []
    with torch.inference_mode():
        ceilings, roofline = measure_ceilings(threads, max(seconds, 0.3))
        console.print(ceilings_table(ceilings))
        use_threads(threads)
        for group in groups:
            if group == STEP:
                steps = [measure_step(backend, config, n, 512, 5 * seconds) for n in (1, 8)]
            else:
                rows += [time_case(case, roofline, seconds) for case in GROUPS[group](backend, config)]
    if rows:
        console.print(kernels_table(f"{backend.name} kernels, {threads} threads, shape {shape}", rows))
    if steps:
        console.print(steps_table(steps))
    settings = {"shape": shape, "backend": backend.name, "groups": list(groups), "threads": threads}
    return document(
        "kernels",
        settings | {"seconds": seconds, "version": backend.version},
        ceilings=[ceiling.to_dict() for ceiling in ceilings],
        kernels=[row.to_dict() for row in rows],
        steps=[step.to_dict() for step in steps],
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def ceilings_table(ceilings: Sequence[Ceiling]) -> Table:
    """This machine's ceilings."""
    table = _table("ceilings", "", "threads", "", "measured by")
    for c in ceilings:
        table.add_row(c.name, str(c.threads), f"{c.value:,.1f} {c.unit}", c.how)
    return table


def kernels_table(title: str, rows: Sequence[Row]) -> Table:
    """One row per case."""
    table = _table(title, "", "time", "rate", "bound", "ceiling")
    for row in rows:
        share = "" if row.share is None else f"{row.share:.0%}"
        rate = f"{_digits(row.rate)} {row.unit}"
        table.add_row(f"{row.kernel} {row.case}", _time(row.microseconds), rate, row.bound, share)
    return table


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{_digits(microseconds)} µs"
    return f"{_digits(microseconds / 1000)} ms"


def steps_table(steps: Sequence[StepShare]) -> Table:
    """Whole decode steps, in ms and by part."""
    table = _table("decode step", "", "ms", "GEMM", "attention", "recurrence", "rest")
    for s in steps:
        parts = [f"{part / s.step:.1%}" for part in (s.gemm, s.attention, s.recurrence)]
        name = f"{s.requests} x {s.context} tokens"
        table.add_row(name, f"{1000 * s.step:,.2f}", *parts, Text(f"{s.rest_share:.1%}", style="bold"))
    return table
