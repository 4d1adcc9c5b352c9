"""``plait bench serve | engine | sweep | kernels | report``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.bench.flags import with_flags
from plait.bench.settings import OutputArgs, ServerArgs, TrafficArgs
from plait.cli_options import with_engine_flags
from plait.config import EngineArgs

app = typer.Typer(
    name="bench",
    help="Measure servers, engines and kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_with_traffic = with_flags(TrafficArgs, "traffic", "Traffic")
_with_server = with_flags(ServerArgs, "server", "Server")
_with_output = with_flags(OutputArgs, "out", "Output")

_Pairs = Annotated[int, typer.Option("--pairs", help="Pairs of runs that --compare makes.", min=2)]
_Over = Annotated[
    str,
    typer.Option("--over", help="Setting and values: concurrency=1,2,4 or max_num_batched_tokens=64,512."),
]


def _run(work: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(work)


@app.command()
@_with_traffic
@_with_server
@_with_output
def serve(
    base_url: Annotated[
        str, typer.Option("--base-url", help="Of an OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    compare: Annotated[
        tuple[str, str] | None, typer.Option("--compare", help="Two URLs, measured pair by pair.")
    ] = None,
    pairs: _Pairs = 6,
    pid: Annotated[
        list[int] | None, typer.Option("--pid", help="Process whose memory to watch, children included.")
    ] = None,
    *,
    traffic: TrafficArgs,
    server: ServerArgs,
    out: OutputArgs,
) -> None:
    """Measure an OpenAI-compatible server: plait's own, or another engine's."""
    from plait.bench import commands

    if compare is None:
        _run(commands.serve(base_url, server, traffic, pid or [], out))
    else:
        _run(commands.compare_servers(compare, server, traffic, pairs, out))


@app.command()
@with_engine_flags
@_with_traffic
@_with_output
def engine(
    model: Annotated[str, typer.Argument(help="As for plait serve.")],
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", help='Two sets of engine settings, as in default "max_num_seqs=8,seed=1".'),
    ] = None,
    pairs: _Pairs = 6,
    *,
    args: EngineArgs,
    traffic: TrafficArgs,
    out: OutputArgs,
) -> None:
    """Measure MODEL in an engine started for it, without HTTP."""
    from plait.bench import commands

    if compare is None:
        _run(commands.engine(args, traffic, out))
    else:
        _run(commands.compare_engines(args, compare, traffic, pairs, out))


@app.command()
@with_engine_flags
@_with_traffic
@_with_output
def sweep(
    model: Annotated[
        str, typer.Argument(help="As for plait serve; with --base-url, as the server calls it.")
    ],
    over: _Over = "concurrency=1,2,4,8",
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Measure this server instead of starting an engine.")
    ] = None,
    *,
    args: EngineArgs,
    traffic: TrafficArgs,
    out: OutputArgs,
) -> None:
    """Measure MODEL over the values of one setting: the curve of throughput against speed per user."""
    from plait.bench import commands
    from plait.bench.sweep import Sweep

    parsed = Sweep.parse(over)
    if base_url is None:
        _run(commands.sweep_engine(args, traffic, parsed, out))
    else:
        server = ServerArgs(model=model, tokenizer=args.tokenizer)
        _run(commands.sweep_server(base_url, server, traffic, parsed, out))


@app.command()
def report(
    result: Annotated[Path, typer.Argument(help="JSON file that a command wrote with --output.")],
    html: Annotated[Path, typer.Argument(help="HTML file to write.")],
) -> None:
    """Make the HTML report of an earlier result."""
    from plait.bench.report import write_html
    from plait.bench.run import SCHEMA

    document = json.loads(result.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{result} is no result of plait bench with schema {SCHEMA}")
    write_html(document, html)


@app.command()
def kernels(
    shape: Annotated[
        str, typer.Argument(help="135m, 0.8b (a hybrid), or a model whose sizes to use; no weights are read.")
    ] = "0.8b",
    backend: Annotated[str, typer.Option("--backend", help="Kernel backend; the best by default.")] = "auto",
    only: Annotated[
        str, typer.Option("--only", help="Groups: linear, attention, delta, rows, sampling, step.")
    ] = "linear,attention,delta,rows,sampling,step",
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads that compute; all by default.", min=1)
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Seconds for each case.", min=0.0)] = 0.3,
    pairs: Annotated[
        int, typer.Option("--pairs", help="Each case and its ceiling are measured in turn, so often.", min=2)
    ] = 5,
    weights: Annotated[
        str,
        typer.Option("--weights", help="Formats of weights for whole steps: float32, bfloat16, int8, int4."),
    ] = "bfloat16,int8,int4",
    output: Annotated[Path | None, typer.Option("--output", help="File for the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="File for a report with plots.")] = None,
) -> None:
    """Measure CPU kernels against what this machine can do at best."""
    import os

    from rich.console import Console

    from plait.bench.kernels import bench_kernels
    from plait.bench.report import write_html, write_json

    groups = [group.strip() for group in only.split(",")]
    count = threads or len(os.sched_getaffinity(0))
    formats = [name.strip() for name in weights.split(",")]
    document = bench_kernels(shape, backend, groups, count, seconds, pairs, formats, Console(highlight=False))
    if output is not None:
        write_json(document, output)
    if html is not None:
        write_html(document, html)
