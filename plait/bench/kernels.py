"""``plait bench kernels``: each kernel against this machine's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
    row_cases,
    sampling_cases,
)
from plait.bench.ceilings import Ceiling, Roofline, measure_ceilings
from plait.bench.linear_cases import linear_cases
from plait.bench.run import document
from plait.bench.shapes import config_of
from plait.bench.stats import Ratio
from plait.bench.step_share import Step, StepBench
from plait.bench.timing import fastest
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
    """One measured case. ``share``: of the ceiling that binds, over pairs; None: nothing binds it."""

    kernel: str
    case: str
    microseconds: float
    rate: float
    unit: str
    bound: str
    share: Ratio | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def time_case(case: Case, roofline: Roofline, seconds: float, pairs: int) -> Row:
    """Time one case for about ``seconds``, and its ceiling beside it."""
    scale = 1e9 if case.unit.startswith("G") else 1.0
    unit = {"GFLOP": "GFLOP/s", "GB": "GB/s"}.get(case.unit, f"{case.unit}/s")
    if case.moved:
        bound = roofline.bound(case.moved, case.operations)
        taken, share = roofline.share(case.call, case.moved, case.operations, seconds, pairs)
    else:
        bound, taken, share = "", fastest(case.call, seconds), None
    return Row(case.kernel, case.case, taken * 1e6, case.amount / taken / scale, unit, bound, share)


def bench_kernels(
    shape: str,
    backend_name: str,
    groups: Sequence[str],
    threads: int,
    seconds: float,
    pairs: int,
    weights: Sequence[str],
    console: Console,
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
    steps: list[Step] = []
    with torch.inference_mode():
        ceilings, roofline = measure_ceilings(threads, max(seconds, 0.3))
        console.print(ceilings_table(ceilings))
        for group in groups:
            if group == STEP:
                for name in weights:
                    steps += measure_steps(backend, config, name, roofline, seconds, pairs)
            else:
                rows += [time_case(case, roofline, seconds, pairs) for case in GROUPS[group](backend, config)]
    if rows:
        console.print(kernels_table(f"{backend.name} kernels, {threads} threads, shape {shape}", rows))
    if steps:
        console.print(steps_table(steps))
    settings = {"shape": shape, "backend": backend.name, "groups": list(groups), "threads": threads}
    return document(
        "kernels",
        settings | {"seconds": seconds, "pairs": pairs, "version": backend.version},
        ceilings=[ceiling.to_dict() for ceiling in ceilings],
        kernels=[row.to_dict() for row in rows],
        steps=[step.to_dict() for step in steps],
    )


def measure_steps(
    backend: Backend, config: ModelConfig, weights: str, roofline: Roofline, seconds: float, pairs: int
) -> list[Step]:
    """Decode steps of 1 and 8 requests, and a prompt, of a model with random weights in one format."""
    bench = StepBench(backend, config, weights)
    try:
        found = [bench.decode(count, 512, roofline, 5 * seconds, pairs) for count in (1, 8)]
        return [*found, bench.prefill(512, roofline, 5 * seconds, pairs)]
    finally:
        bench.close()


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
        rate = f"{_digits(row.rate)} {row.unit}"
        table.add_row(f"{row.kernel} {row.case}", _time(row.microseconds), rate, row.bound, _share(row.share))
    return table


def _share(share: Ratio | None) -> str:
    return "" if share is None else f"{share.ratio:.0%} ({share.low:.0%} to {share.high:.0%})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{_digits(microseconds)} µs"
    return f"{_digits(microseconds / 1000)} ms"


def steps_table(steps: Sequence[Step]) -> Table:
    """Whole steps, in ms, by part and against the ceilings."""
    table = _table("whole steps", "", "ms", "GEMM", "attention", "recurrence", "rest", "bound", "ceiling")
    for s in steps:
        parts = [f"{part / s.seconds:.1%}" for part in (s.gemm, s.attention, s.recurrence)]
        rest = Text(f"{s.rest / s.seconds:.1%}", style="bold")
        table.add_row(s.name, f"{1000 * s.seconds:,.2f}", *parts, rest, s.bound, _share(s.share))
    return table
