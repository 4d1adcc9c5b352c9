"""What the commands do: start targets, run traffic, show and write what came out."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from plait.bench.compare import interleave
from plait.bench.engine_target import EngineTarget
from plait.bench.figures import Figures
from plait.bench.http_target import HTTPTarget
from plait.bench.record import Record
from plait.bench.report import write_html, write_json
from plait.bench.run import Result, document, measure
from plait.bench.settings import OutputArgs, ServerArgs, TrafficArgs
from plait.bench.sweep import Sweep, overrides, pareto
from plait.bench.tables import comparison_table, milliseconds, show_result, sweep_table
from plait.bench.target import Target
from plait.bench.traffic import Traffic, describe
from plait.bench.workload import Writer
from plait.bench.writers import TokenWriter, WordWriter
from plait.config import EngineArgs
from plait.engine.memory import available_bytes
from plait.models.hub import resolve_model
from plait.text.tokenizer import Tokenizer

COMPARED_SHARE = 0.4
"""Part of the memory at hand that each of two engines gets, when they are compared without a limit."""

Document = dict[str, Any]


class Screen:
    """Tables on standard output; progress and notes on standard error."""

    def __init__(self) -> None:
        self.out = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, line: str) -> None:
        self._notes.print(Text(line, style="dim"))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[Record], None]]:
        """A bar of ``total`` requests; yields what to call with each record."""
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[last]}"),
            TimeElapsedColumn(),
            console=self._notes,
            disable=not self._notes.is_terminal,
        )
        task = bar.add_task(what, total=total, last="")

        def advance(record: Record) -> None:
            last = f"TTFT {milliseconds(record.ttft)} ms" if record.ok else "failed"
            bar.update(task, advance=1, last=last)

        with bar:
            yield advance

    def finish(self, result: Document, out: OutputArgs) -> None:
        """Write the files that were asked for."""
        if out.output is not None:
            write_json(result, Path(out.output))
            self.note(f"wrote {out.output}")
        if out.html is not None:
            write_html(result, Path(out.html))
            self.note(f"wrote {out.html}")


async def run_once(
    screen: Screen, target: Target, traffic: Traffic, pids: Sequence[int], what: str = "requests"
) -> Result:
    """One measured run with a progress bar."""
    with screen.progress(what, traffic.requests) as advance:
        return await measure(target, traffic, pids=list(pids), on_record=advance)


async def serve(
    url: str, server: ServerArgs, args: TrafficArgs, pids: Sequence[int], out: OutputArgs
) -> Document:
    """Measure the server at ``url``.

    Raises:
        TargetError: it cannot be measured.
    """
    screen, args = Screen(), args.settled()
    tokenizer = _tokenizer(server)
    target = _http_target(url, server, tokenizer)
    try:
        await _connect(screen, target)
        screen.note(f"{target.model} at {target.base_url}: {describe(args)}")
        result = await run_once(screen, target, Traffic.of(args, _writer(server, args, tokenizer)), pids)
    finally:
        await target.close()
    settings = {"url": url, "model": target.model, "server": _public(server), "traffic": asdict(args)}
    return _one_result(screen, "serve", settings, args, result, out)


async def engine(model: EngineArgs, args: TrafficArgs, out: OutputArgs) -> Document:
    """Measure an engine started here. Raises as ``AsyncEngine.start``."""
    screen, args = Screen(), args.settled()
    target = await EngineTarget.start(model.model, model, screen.note)
    try:
        screen.note(describe(args))
        result = await run_once(screen, target, Traffic.of(args, target.writer()), [target.pid])
    finally:
        await target.close()
    settings = {"engine": asdict(model), "traffic": asdict(args)}
    return _one_result(screen, "engine", settings, args, result, out)


def _one_result(
    screen: Screen, kind: str, settings: dict[str, Any], args: TrafficArgs, result: Result, out: OutputArgs
) -> Document:
    show_result(screen.out, result)
    made = document(kind, settings, traffic=describe(args), result=result.to_dict())
    screen.finish(made, out)
    return made


async def compare_servers(
    urls: tuple[str, str],
    server: ServerArgs,
    args: TrafficArgs,
    pairs: int,
    out: OutputArgs,
) -> Document:
    """Measure two servers pair by pair."""
    screen, args = Screen(), args.settled()
    tokenizer = _tokenizer(server)
    targets = [_http_target(url, server, tokenizer) for url in urls]
    try:
        for target in targets:
            await _connect(screen, target)
        writer = _writer(server, args, tokenizer)
        settings = {"urls": list(urls), "server": _public(server), "traffic": asdict(args), "pairs": pairs}
        return await _compare(screen, targets, [writer] * 2, list(urls), [[], []], settings, args, pairs, out)
    finally:
        for target in targets:
            await target.close()


async def compare_engines(
    base: EngineArgs, sides: tuple[str, str], args: TrafficArgs, pairs: int, out: OutputArgs
) -> Document:
    """Measure two configurations of an engine pair by pair; both stay loaded, and one runs at a time."""
    screen, args = Screen(), args.settled()
    names = [side or "default" for side in sides]
    asked = [replace(base, **overrides(side)) for side in sides]
    spare = available_bytes()
    targets: list[EngineTarget] = []
    try:
        for name, settings in zip(names, asked, strict=True):
            if settings.memory_limit is settings.gpu_memory_utilization is None and spare is not None:
                settings.memory_limit = int(spare * COMPARED_SHARE)
            screen.note(f"starting {name}")
            targets.append(await EngineTarget.start(name, settings, screen.note))
        settings_out = {"engine": asdict(base), "sides": names, "traffic": asdict(args), "pairs": pairs}
        writers = [target.writer() for target in targets]
        pids = [[target.pid] for target in targets]
        return await _compare(screen, targets, writers, names, pids, settings_out, args, pairs, out)
    finally:
        for target in targets:
            await target.close()


async def _compare(
    screen: Screen,
    targets: Sequence[Target],
    writers: Sequence[Writer],
    names: list[str],
    pids: Sequence[Sequence[int]],
    settings: dict[str, Any],
    args: TrafficArgs,
    pairs: int,
    out: OutputArgs,
) -> Document:
    if pairs < 2:
        raise ValueError(f"--pairs {pairs}: an interval needs 2 or more")
    screen.note(f"{pairs} pairs of {describe(args)}")

    async def run(side: int, number: int) -> Result:
        traffic = Traffic.of(args, writers[side], number + 1)
        what = f"pair {number + 1} of {pairs}: {names[side]}"
        return await run_once(screen, targets[side], traffic, pids[side], what)

    def on_run(side: int, number: int, result: Result) -> None:
        figures = result.figures["all"]
        screen.note(
            f"pair {number + 1}, {names[side]}: {figures.output_rate:,.1f} output tokens/s, "
            f"{figures.failed} failed"
        )

    assert args.traffic_seed is not None
    comparison = await interleave(names, pairs, args.traffic_seed, run, on_run)
    screen.out.print(comparison_table(comparison, 1))
    made = document("compare", settings, traffic=describe(args), comparison=comparison.to_dict())
    screen.finish(made, out)
    return made


async def sweep_server(
    url: str, server: ServerArgs, args: TrafficArgs, over: Sweep, out: OutputArgs
) -> Document:
    """Measure a server over values of a traffic setting.

    Raises:
        ValueError: ``over`` is an engine setting.
    """
    if not over.of_traffic:
        raise ValueError(f"--over {over.name}: a running server keeps its settings; leave out --base-url")
    screen, args = Screen(), args.settled()
    tokenizer = _tokenizer(server)
    target = _http_target(url, server, tokenizer)
    writer = _writer(server, args, tokenizer)
    try:
        await _connect(screen, target)

        async def point(number: int, value: Any) -> Result:
            traffic = Traffic.of(replace(args, **{over.name: value}), writer, number + 1)
            return await run_once(screen, target, traffic, [], f"{over.name}={value}")

        settings = {"url": url, "server": _public(server), "traffic": asdict(args)}
        return await _sweep(screen, over, point, settings, args, out)
    finally:
        await target.close()


async def sweep_engine(base: EngineArgs, args: TrafficArgs, over: Sweep, out: OutputArgs) -> Document:
    """Measure an engine over values of a setting; it is started anew for each value of an engine setting."""
    screen, args = Screen(), args.settled()
    shared = await EngineTarget.start(base.model, base, screen.note) if over.of_traffic else None

    async def point(number: int, value: Any) -> Result:
        target = shared
        asked = args
        if target is None:
            target = await EngineTarget.start(base.model, replace(base, **{over.name: value}), screen.note)
        else:
            asked = replace(args, **{over.name: value})
        try:
            traffic = Traffic.of(asked, target.writer(), number + 1)
            return await run_once(screen, target, traffic, [target.pid], f"{over.name}={value}")
        finally:
            if target is not shared:
                await target.close()

    try:
        settings = {"engine": asdict(base), "traffic": asdict(args)}
        return await _sweep(screen, over, point, settings, args, out)
    finally:
        if shared is not None:
            await shared.close()


async def _sweep(
    screen: Screen,
    over: Sweep,
    point: Callable[[int, Any], Awaitable[Result]],
    settings: dict[str, Any],
    args: TrafficArgs,
    out: OutputArgs,
) -> Document:
    results = [await point(number, value) for number, value in enumerate(over.values)]
    figures: list[Figures] = [result.figures["all"] for result in results]
    best = pareto([(f.user_speed or 0.0, f.output_rate) for f in figures])
    names = [str(value) for value in over.values]
    screen.out.print(sweep_table(over.name, list(zip(names, figures, strict=True)), best))
    rates = [f.total_rate for f in figures]
    if min(rates) > 0:
        screen.out.print(
            f"total tokens/s: the slowest point has {min(rates) / max(rates):.1%} of the fastest"
        )
    points = [
        {"value": value, "pareto": on_curve, **result.to_dict(with_requests=False)}
        for value, on_curve, result in zip(over.values, best, results, strict=True)
    ]
    made = document("sweep", settings, traffic=describe(args), over=over.name, points=points)
    screen.finish(made, out)
    return made


def _tokenizer(server: ServerArgs) -> Tokenizer | None:
    return Tokenizer.load(resolve_model(server.tokenizer)) if server.tokenizer else None


def _http_target(url: str, server: ServerArgs, tokenizer: Tokenizer | None) -> HTTPTarget:
    try:
        extra = json.loads(server.extra_body)
    except ValueError as error:
        raise ValueError(f"--extra-body is not valid JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ValueError("--extra-body must be a JSON object")
    return HTTPTarget(
        url,
        server.model,
        endpoint=server.endpoint,
        api_key=server.api_key,
        timeout=server.timeout,
        tokenizer=tokenizer,
        extra=extra,
    )


async def _connect(screen: Screen, target: HTTPTarget) -> None:
    await target.connect()
    for line in target.notes:
        screen.note(line)


def _writer(server: ServerArgs, args: TrafficArgs, tokenizer: Tokenizer | None) -> Writer:
    """Writes prompts of the kind asked for.

    Raises:
        ValueError: token ids for an endpoint or a profile that has none.
    """
    if server.prompts == "text":
        return WordWriter(tokenizer)
    if server.prompts != "tokens":
        raise ValueError(f"--prompts {server.prompts!r}: choose text or tokens")
    if server.endpoint != "completions":
        raise ValueError("--prompts tokens: chat takes text alone; use --endpoint completions")
    if args.profile == "conversation":
        raise ValueError(
            "--prompts tokens: answers come as text, so that a conversation needs --prompts text"
        )
    if tokenizer is not None:
        return TokenWriter(server.vocab_size or tokenizer.vocab_size, tokenizer.special_ids)
    if server.vocab_size is None:
        raise ValueError("--prompts tokens needs --vocab-size or --tokenizer, to know which ids there are")
    return TokenWriter(server.vocab_size)


def _public(server: ServerArgs) -> dict[str, Any]:
    """The settings without the key."""
    return asdict(replace(server, api_key=None))
