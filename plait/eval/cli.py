"""``plait eval``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli_options import with_engine_flags
from plait.config import EngineArgs


@with_engine_flags
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="As for plait serve; with --base-url, as the server calls it (- for its first)."),
    ],
    *,
    args: EngineArgs,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Ask this OpenAI-compatible server instead of an engine.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key sent to the server.", envvar="PLAIT_API_KEY")
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds", help="Held-out kinds to ask, with commas; all by default, none beside --data."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="JSONL file of questions and answers, as GSM8K's; may be given again."),
    ] = None,
    items: Annotated[
        int, typer.Option("--items", help="Questions of each kind or file; 0: all of a file.", min=0)
    ] = 100,
    minimum: Annotated[
        str | None,
        typer.Option("--min", help="Least accuracy, else exit code 1: 0.9, or words=0.96,codes=0.9."),
    ] = None,
    paired: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--paired", help='Two configurations: URLs, or engine settings such as default "max_num_seqs=1".'
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Questions asked at a time.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.", min=0.0)] = 0.0,
    eval_seed: Annotated[
        int, typer.Option("--eval-seed", help="Which questions are drawn, and how answers are sampled.")
    ] = 0,
    chat_template_kwargs: Annotated[
        str, typer.Option("--chat-template-kwargs", help='JSON object, such as {"enable_thinking": false}.')
    ] = "{}",
    output: Annotated[
        Path | None, typer.Option("--output", help="File for the result as JSON, with every answer.")
    ] = None,
) -> None:
    """Ask MODEL questions that have one right answer, and count: a gate for accuracy."""
    from plait.eval import command
    from plait.eval.targets import Asking

    names = command.kinds_named(kinds, bool(data))
    files = tuple(data or ())
    if not names and not files:
        raise typer.BadParameter("--kinds names no kind, and there is no --data: nothing is asked")
    if names and not items:
        raise typer.BadParameter("--items 0 is for files; give a number of questions of each kind")
    asked = (*names, *(path.stem for path in files))
    remote = base_url is not None or (paired is not None and all("://" in side for side in paired))
    settings = command.EvalArgs(
        model=None if model == "-" else model,
        base_url=base_url,
        api_key=api_key,
        kinds=names,
        items=items,
        data=files,
        concurrency=concurrency,
        minima=command.minima_named(minimum, asked),
        asking=Asking(max_tokens, temperature, eval_seed, _json_object(chat_template_kwargs)),
    )
    if base_url is not None and paired is not None:
        raise typer.BadParameter("--paired names whom to ask; leave out --base-url")
    engine = None if remote else args
    work = (
        command.evaluate(settings, engine, output)
        if paired is None
        else command.compare(settings, paired, engine, output)
    )
    if not asyncio.run(work):
        raise typer.Exit(1)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--chat-template-kwargs is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("--chat-template-kwargs must be a JSON object")
    return value
