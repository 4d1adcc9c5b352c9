"""Result documents as JSON and as one HTML file that needs nothing besides itself."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plait.bench.plots import plots
from plait.bench.tables import milliseconds

Document = dict[str, Any]

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #d8dee4; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; } img { max-width: 100%; }
.meta { color: #59636e; } details { margin-top: 2rem; } pre { overflow-x: auto; font-size: .8rem; }
"""
_PARTS = ("mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = ("ttft", "itl", "tpot", "e2e")


def write_json(document: Document, path: Path) -> None:
    """Write the document, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_html(document: Document, path: Path) -> None:
    """Write the report of a document that any command made.

    Raises:
        PlotError: matplotlib is not installed.
    """
    page = render(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def render(document: Document) -> str:
    """The HTML page."""
    machine, kind = document["machine"], document["kind"]
    title = f"plait bench {kind}"
    about = f"plait {document['plait']}, {document['date']}, {machine['processor']}, {machine['cores']} cores"
    parts = [f"<h1>{title}</h1><p class=meta>{_text(about)}</p>"]
    if "traffic" in document:
        parts.append(f"<p>{_text(document['traffic'])}</p>")
    parts += _tables(document)
    parts += [
        f'<figure><figcaption>{_text(caption)}</figcaption><img alt="{_text(caption)}" src="{data}"></figure>'
        for caption, data in plots(document)
    ]
    settings = _text(json.dumps(document["settings"], indent=1))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _tables(document: Document) -> list[str]:
    match document["kind"]:
        case "serve" | "engine":
            figures = document["result"]["figures"]
            return [
                _heading("Throughput"),
                _rates(figures.items()),
                _heading("Latency, ms"),
                _latencies(figures),
            ]
        case "compare":
            return [_heading("Ratios"), _ratios(document["comparison"])]
        case "sweep":
            points = [(f"{document['over']} = {p['value']}", p["figures"]["all"]) for p in document["points"]]
            return [_heading("Points"), _rates(points)]
        case "kernels":
            return [_heading("Ceilings"), _ceilings(document), _heading("Kernels"), _kernels(document)]
    return []


def _text(value: object) -> str:
    return html.escape(str(value))


def _heading(words: str) -> str:
    return f"<h2>{_text(words)}</h2>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _rates(figures: Iterable[tuple[str, dict[str, Any]]]) -> str:
    rows = []
    for name, f in figures:
        cached = "not reported" if f["cached_share"] is None else f"{f['cached_share']:.1%}"
        rates = [f"{f[key]:,.1f}" for key in ("input_rate", "output_rate", "total_rate")]
        rows.append([name, f["completed"], f["failed"], f"{f['request_rate']:.3f}", *rates, cached])
    columns = (
        "",
        "completed",
        "failed",
        "requests/s",
        "input tok/s",
        "output tok/s",
        "total tok/s",
        "cached",
    )
    return _table(columns, rows)


def _latencies(figures: dict[str, dict[str, Any]]) -> str:
    rows = [
        [name.upper(), label, *(milliseconds(f[name][part]) for part in _PARTS)]
        for name in _LATENCIES
        for label, f in figures.items()
        if f[name] is not None
    ]
    return _table(("", "requests", *_PARTS), rows)


def _ratios(comparison: dict[str, Any]) -> str:
    rows = [
        [name, side, f"{r['ratio']:.3f}", f"{r['low']:.3f} to {r['high']:.3f}", r["pairs"]]
        for side, ratios in comparison["ratios"].items()
        for name, r in ratios.items()
    ]
    return _table(("", "", f"ratio to {comparison['base']}", "95% interval", "pairs"), rows)


def _ceilings(document: Document) -> str:
    rows = [
        [c["name"], c["threads"], f"{c['value']:,.1f} {c['unit']}", c["how"]] for c in document["ceilings"]
    ]
    return _table(("", "threads", "", "measured by"), rows)


def _kernels(document: Document) -> str:
    rows = [
        [
            f"{row['kernel']} {row['case']}",
            f"{row['microseconds']:,.1f}",
            f"{row['rate']:,.1f} {row['unit']}",
            row["bound"],
            "" if row["share"] is None else f"{row['share']['ratio']:.0%}",
        ]
        for row in document["kernels"]
    ]
    return _table(("", "µs", "rate", "bound", "share of ceiling"), rows)
