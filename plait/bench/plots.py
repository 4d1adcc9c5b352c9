"""Plots of a result document, as SVG. Needs matplotlib, which comes with ``plait[bench]``."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

from plait.bench.compare import HIGHER_IS_BETTER

Document = dict[str, Any]
Plot = tuple[str, str]
"""A caption, and the SVG as a data URL."""


class PlotError(ValueError):
    """matplotlib is missing."""


def plots(document: Document) -> list[Plot]:
    """The plots that a document's kind has.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("HTML reports need more packages: pip install 'plait[bench]'") from error
    drawn = []
    for caption, draw in _KINDS.get(document["kind"], ()):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if draw(axes, document):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            data = base64.b64encode(buffer.getvalue()).decode()
            drawn.append((caption, f"data:image/svg+xml;base64,{data}"))
    return drawn


def _classes(document: Document) -> dict[str, list[dict[str, Any]]]:
    """Requests that were answered, by class, in the order in which they were due."""
    good = [r for r in document["result"]["requests"] if r["error"] is None]
    classes: dict[str, list[dict[str, Any]]] = {}
    for request in sorted(good, key=lambda r: r["scheduled"]):
        classes.setdefault(request["label"], []).append(request)
    return classes


def _ttft(request: dict[str, Any]) -> float:
    first = request["chunks"][0] if request["chunks"] else request["ended"]
    return float(first - request["scheduled"])


def _gaps(requests: list[dict[str, Any]]) -> list[float]:
    return [b - a for r in requests for a, b in zip(r["chunks"], r["chunks"][1:], strict=False)]


def _distribution(axes: Any, values: dict[str, list[float]], unit: str) -> bool:
    """The share of values at or below x, one line per class."""
    for label, found in values.items():
        if found:
            ordered = sorted(found)
            shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
            axes.step([ordered[0], *ordered], [0, *shares], where="post", label=label)
    axes.set(xlabel=unit, ylabel="share of requests", ylim=(0, 1.02))
    if len(values) > 1:
        axes.legend(frameon=False)
    return any(values.values())


def _ttft_distribution(axes: Any, document: Document) -> bool:
    values = {label: [_ttft(r) for r in found] for label, found in _classes(document).items()}
    return _distribution(axes, values, "time to first token, s")


def _itl_distribution(axes: Any, document: Document) -> bool:
    values = {label: [1000 * g for g in _gaps(found)] for label, found in _classes(document).items()}
    found = _distribution(axes, values, "inter-token latency, ms")
    axes.set_ylabel("share of tokens")
    return found


def _over_time(axes: Any, document: Document) -> bool:
    classes = _classes(document)
    for label, found in classes.items():
        axes.plot([r["scheduled"] for r in found], [_ttft(r) for r in found], "o", alpha=0.6, label=label)
    axes.set(xlabel="due at, s", ylabel="time to first token, s")
    axes.set_ylim(bottom=0)
    if len(classes) > 1:
        axes.legend(frameon=False)
    return bool(classes)


def _memory(axes: Any, document: Document) -> bool:
    memory = document["result"]["memory"]
    axes.plot(memory["seconds"], [b / 2**30 for b in memory["pss_bytes"]])
    axes.set(xlabel="s", ylabel="PSS, GiB")
    axes.set_ylim(bottom=0)
    return bool(memory["seconds"])


def _ratios(axes: Any, document: Document) -> bool:
    comparison = document["comparison"]
    names = [name for ratios in comparison["ratios"].values() for name in ratios]
    names = list(dict.fromkeys(names))[::-1]
    for number, (side, ratios) in enumerate(comparison["ratios"].items()):
        rows = [(names.index(name) + 0.15 * number, r) for name, r in ratios.items()]
        low, high = ([abs(r[end] - r["ratio"]) for _, r in rows] for end in ("low", "high"))
        centres, heights = [r["ratio"] for _, r in rows], [row for row, _ in rows]
        axes.errorbar(centres, heights, xerr=[low, high], fmt="o", capsize=3, label=side)
    axes.axvline(1.0, color="black", linewidth=1)
    words = [f"{name} ({'more' if name in HIGHER_IS_BETTER else 'less'} is better)" for name in names]
    axes.set_yticks(range(len(names)), words, fontsize=7)
    axes.set(xscale="log", xlabel=f"ratio to {comparison['base']}, 95% interval")
    if len(comparison["ratios"]) > 1:
        axes.legend(frameon=False)
    return bool(names)


def _pareto(axes: Any, document: Document) -> bool:
    points = [p for p in document["points"] if p["figures"]["all"]["user_speed"] is not None]
    place = [(p["figures"]["all"]["user_speed"], p["figures"]["all"]["output_rate"]) for p in points]
    curve = sorted(xy for xy, p in zip(place, points, strict=True) if p["pareto"])
    axes.plot(*zip(*curve, strict=True), "-", alpha=0.5) if curve else None
    axes.plot([x for x, _ in place], [y for _, y in place], "o")
    for (x, y), point in zip(place, points, strict=True):
        axes.annotate(f"{point['value']}", (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="tokens/s per user (1 / median TPOT)", ylabel="output tokens/s, all users")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return bool(points)


def _shares(axes: Any, document: Document) -> bool:
    rows = [row for row in document["kernels"] if row["share"]][::-1]
    axes.figure.set_size_inches(7.2, 1.2 + 0.2 * len(rows))
    axes.barh(
        [f"{row['kernel']} {row['case']}" for row in rows], [100 * row["share"]["ratio"] for row in rows]
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.axvline(100, color="black", linewidth=1)
    axes.set(xlabel="share of this machine's ceiling, %")
    return bool(rows)


_RUN: tuple[tuple[str, Callable[[Any, Document], bool]], ...] = (
    ("Time to first token", _ttft_distribution),
    ("Inter-token latency", _itl_distribution),
    ("Time to first token over the run", _over_time),
    ("Memory", _memory),
)
_KINDS = {
    "serve": _RUN,
    "engine": _RUN,
    "compare": (("Ratios", _ratios),),
    "sweep": (("Throughput against speed per user", _pareto),),
    "kernels": (("Kernels", _shares),),
}
