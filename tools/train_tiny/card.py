"""The model card: what was trained, on what, for how long, and what it scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tools.train_tiny.stages import STAGES

_HEAD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3_5, gated-deltanet, hybrid, tiny]
---

# plait-tiny

A hybrid of Qwen3.5's architecture, three layers of Gated DeltaNet to one of attention, small enough to come
with plait: it shows a hybrid think, call tools and remember where there is no network, and its held-out
questions show a corrupted state as wrong answers. It knows a small world of names, words and digits, seven
tools, and some sentences about plait. It knows nothing else, and was trained on English of one form alone.
"""

_USE = """
## Use

```
plait chat plait-tiny
plait eval plait-tiny
```

transformers loads the folder too. The chat template is of Qwen3.5's form: answers begin inside `<think>`,
calls are written as Qwen3-Coder writes them. Of a tool the model is shown its name and its parameters' names.
"""

_DATA = """
## Data

All text is made by a program (`plait/eval/tasks`, `tools/train_tiny`), from a seed. A hash of each item
decides whether it may occur in training text; a tenth may not, and all questions below are about those.
`tests/test_eval_items.py` looks for each of them in training text.
"""


def write_card(run: Path, result: Path, folder: Path) -> None:
    """Write README.md of a model.

    Args:
        run: folder of the training run, for its log.
        result: what ``plait eval --output`` wrote for this model.
        folder: the model's.
    """
    document = json.loads(result.read_text())
    text = _HEAD + _USE + _DATA + _recipe(run) + _scores(document)
    (folder / "README.md").write_text(text)


def _recipe(run: Path) -> str:
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = [entry for entry in log if entry["event"] in ("step", "evaluation")][-1]
    start = [entry for entry in log if entry["event"] == "start"][-1]
    progress = torch.load(run / "state.pt", weights_only=True)["progress"]
    anneal = progress["anneal_over"]
    until = progress["anneal_from"] + anneal
    names = ", ".join(f"{stage.name} ({stage.length})" for stage in STAGES)
    hours = f"{last['cpu'] / 3600:.2f} hours of processor time, {last['wall'] / 3600:.2f} on the clock"
    return f"""
## Recipe

{start["parameters"]:,} parameters, vocabulary of {start["vocabulary"]:,}. {last["tokens"]:,} tokens in
{last["step"]:,} steps by {start["processes"]} processes of one thread, {hours}.
AdamW at {start["rate"]:g}, which falls to nearly nothing over the last {anneal:,} tokens, decay
0.05 on matrices; the weights are a running mean over about 250 steps, in bfloat16. Stages, with the length of
their sequences, each gated on an evaluation: {names}.

```
python -m tools.train_tiny tokenizer RUN
python -m tools.train_tiny train RUN --until {until} --anneal {anneal}
python -m tools.train_tiny export RUN MODEL
```
"""


def _scores(document: dict[str, Any]) -> str:
    lines = [
        "\n## Scores\n",
        "Whole answers, word for word, greedy; 95% intervals (Wilson).\n",
        "| kind | questions | accuracy | 95% interval |",
        "|---|---|---|---|",
    ]
    for score in document["sides"][0]["scores"]:
        interval = f"{score['low']:.3f} to {score['high']:.3f}"
        lines.append(f"| `{score['kind']}` | {score['count']} | {score['accuracy']:.3f} | {interval} |")
    return "\n".join(lines) + "\n"
