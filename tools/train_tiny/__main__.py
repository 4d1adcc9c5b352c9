"""Commands that make plait-tiny, in order: tokenizer, train, export, card."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated

import typer

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Argument(help="the folder of the run")]


@app.command()
def tokenizer(folder: Folder, vocab_size: int = 1792, documents: int = 20_000, seed: int = 1) -> None:
    """Train the tokenizer on training text."""
    from tools.train_tiny.stages import STAGES, draw_conversation
    from tools.train_tiny.text import render
    from tools.train_tiny.tokenizer import save, train

    random = Random(seed)
    texts = (render(draw_conversation(random, STAGES[2])) for _ in range(documents))
    save(train(texts, vocab_size), folder / "tokenizer")


@app.command()
def train(
    folder: Folder,
    processes: Annotated[int, typer.Option(help="processes of one thread each")] = 2,
    seed: int = 1,
    rate: Annotated[float, typer.Option(help="learning rate")] = 4e-3,
    anneal: Annotated[int, typer.Option(help="let the rate fall over so many tokens, then end")] = 0,
    until: Annotated[int, typer.Option(help="end after so many tokens; 0: when stopped")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="tokens")] = 500_000,
    items: Annotated[int, typer.Option(help="held-out questions of each kind in an evaluation")] = 64,
) -> None:
    """Train, or go on training; SIGTERM and Ctrl-C end it after the step under way, and the run is kept."""
    from tools.train_tiny.train import Options, launch

    launch(
        Options(
            folder=folder,
            processes=processes,
            seed=seed,
            rate=rate,
            anneal=anneal,
            until=until,
            evaluate_every=evaluate_every,
            items=items,
        )
    )


@app.command()
def export(folder: Folder, target: Annotated[Path, typer.Argument(help="the model's folder")]) -> None:
    """Write the weights of the run as a model that plait and transformers load."""
    from tools.train_tiny.export import export_run

    progress = export_run(folder, target)
    print(f"{target}: after {progress.tokens:,} tokens, {progress.cpu / 3600:.2f} hours of processor time")


@app.command()
def card(
    folder: Folder,
    result: Annotated[Path, typer.Argument(help="what plait eval --output wrote")],
    target: Annotated[Path, typer.Argument(help="the model's folder")],
) -> None:
    """Write the model card."""
    from tools.train_tiny.card import write_card

    write_card(folder, result, target)


if __name__ == "__main__":
    app()
