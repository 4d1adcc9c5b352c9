"""Figures in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.bench.compare import Comparison
from plait.bench.figures import Figures
from plait.bench.run import Result
from plait.bench.stats import Summary
from plait.engine.memory import in_words

_PARTS = ("mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = ("ttft", "itl", "tpot", "e2e")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def milliseconds(seconds: float) -> str:
    """A latency in ms, with as many digits as it can carry."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show_result(console: Console, result: Result) -> None:
    """The tables of one run."""
    console.print(rates_table(result.figures))
    console.print(latency_table(result.figures))
    if result.memory.peak is not None:
        last = result.memory.pss_bytes[-1]
        console.print(f"memory (PSS): peak {in_words(result.memory.peak)}, at the end {in_words(last)}")
    if "chunks" in {figures.token_counts for figures in result.figures.values()}:
        console.print("the server reports no usage: output tokens are counted as streamed pieces")
    errors = [record.error for record in result.records if record.error is not None]
    if errors:
        console.print(Text(f"{len(errors)} failed; the first: {errors[0]}", style="bold red"))


def rates_table(figures: Mapping[str, Figures]) -> Table:
    """Counts and rates: one row per class."""
    table = _table(
        "throughput, per second", "", "done", "failed", "requests", "in", "out", "tokens", "cached"
    )
    for name, f in figures.items():
        cached = "unknown" if f.cached_share is None else f"{f.cached_share:.1%}"
        rates = (f"{f.request_rate:.3f}", *(f"{x:,.1f}" for x in (f.input_rate, f.output_rate, f.total_rate)))
        table.add_row(name, str(f.completed), str(f.failed), *rates, cached)
    return table


def latency_table(figures: Mapping[str, Figures]) -> Table:
    """Latencies in ms: one row per quantity and class."""
    table = _table("latency, ms", "", "", *_PARTS)
    for name in _LATENCIES:
        for label, f in figures.items():
            summary: Summary | None = getattr(f, name)
            if summary is not None:
                cells = (milliseconds(getattr(summary, part)) for part in _PARTS)
                table.add_row(name.upper(), label if len(figures) > 1 else "", *cells)
    return table


def comparison_table(comparison: Comparison, side: int) -> Table:
    """Medians of both sides over the rounds, and the ratio with its interval."""
    base, other = comparison.sides[0], comparison.sides[side]
    table = _table(f"B / A, A = {base}, B = {other}", "", "A", "B", "B / A", "95% interval", "")
    for name, ratio in comparison.ratios(side).items():
        cells = [_typical(comparison.runs[s], name) for s in (0, side)]
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        verdict = comparison.verdict(name, ratio)
        table.add_row(name, *cells, f"{ratio.ratio:.3f}", interval, Text(verdict, style=_style(verdict)))
    return table


def _typical(runs: Sequence[Result], name: str) -> str:
    values = [run.figures["all"].metrics()[name] for run in runs]
    summary = Summary.of(values)
    assert summary is not None
    if name.split("_")[0] in _LATENCIES:
        return f"{milliseconds(summary.p50)} ms"
    return f"{summary.p50:.1%}" if name == "cached_share" else f"{summary.p50:,.2f}/s"


def _style(verdict: str) -> str:
    return {"better": "bold green", "worse": "bold red"}.get(verdict, "dim")


def sweep_table(over: str, points: Sequence[tuple[str, Figures]], best: Sequence[bool]) -> Table:
    """One row per setting; those on the Pareto curve are marked."""
    table = _table("sweep", over, "output tok/s", "tok/s per user", "TTFT p50 ms", "ITL p99 ms", "Pareto")
    for (value, f), on_curve in zip(points, best, strict=True):
        speed = "" if f.user_speed is None else f"{f.user_speed:,.1f}"
        ttft = "" if f.ttft is None else milliseconds(f.ttft.p50)
        itl = "" if f.itl is None else milliseconds(f.itl.p99)
        table.add_row(value, f"{f.output_rate:,.1f}", speed, ttft, itl, "●" if on_curve else "")
    return table
