"""How often whole answers are right, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.distributed as dist

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw
from plait.eval.kinds import KINDS
from plait.eval.tasks import drills, recall, talk
from tools.train_tiny.model import TinyLM
from tools.train_tiny.text import Encoder

SEED = "development"
"""Not the seed of the gate: what decides about training is not what it is judged by."""
_BATCH = 16


def _codes(length: int) -> Callable[[Draw], Conversation]:
    return lambda draw: recall.recall(draw, length - 10, draw.random.randint(1, 3), ("code",))


def _talk(length: int) -> Callable[[Draw], Conversation]:
    return lambda draw: talk.talk(draw, length - 20)


MEASURES: dict[str, Callable[[Draw], Conversation]] = {
    "drill words": lambda draw: drills.words(draw, 120),
    "drill digits": lambda draw: drills.digits(draw, 180),
    "codes 100": _codes(100),
    "codes 200": _codes(200),
    "codes 500": _codes(500),
    "talk 200": _talk(200),
    "talk 400": _talk(400),
    **{name: KINDS[name].draw for name in KINDS if name not in ("codes", "codes-long", "talk")},
}


def held_out_sets(encoder: Encoder, count: int) -> dict[str, list[tuple[list[int], tuple[int, int]]]]:
    """For each measure, token ids and where the last answer stands in them."""
    sets = {}
    for name, make in MEASURES.items():
        draw = Draw(Random(f"{SEED} {name}"), held=True)
        encoded = [encoder.encode(make(draw)) for _ in range(count)]
        sets[name] = [(ids, answers[-1]) for ids, answers in encoded]
    return sets


@torch.inference_mode()
def accuracies(
    model: TinyLM, sets: dict[str, list[tuple[list[int], tuple[int, int]]]], rank: int, processes: int
) -> dict[str, float]:
    """The share of answers that greedy decoding gives word for word; the work is split between processes.

    An answer is what greedy decoding gives exactly if each of its tokens is the likeliest behind those before
    it, so that one pass over the whole text decides.
    """
    rights = []
    for items in sets.values():
        mine = sorted(items[rank::processes], key=lambda item: len(item[0]))
        parts = [mine[at : at + _BATCH] for at in range(0, len(mine), _BATCH)]
        rights.append(sum(_right(model, part) for part in parts))
    totals = torch.tensor(rights, dtype=torch.float64)
    if processes > 1:
        dist.all_reduce(totals)
    return {
        name: round(total / len(items), 3)
        for (name, items), total in zip(sets.items(), totals.tolist(), strict=True)
    }


def _right(model: TinyLM, part: list[tuple[list[int], tuple[int, int]]]) -> int:
    longest = max(len(ids) for ids, _ in part)
    padded = -(-longest // model.chunk) * model.chunk
    batch = torch.zeros(len(part), padded, dtype=torch.long)
    for row, (ids, _) in enumerate(part):
        batch[row, : len(ids)] = torch.tensor(ids)
    likeliest = model(batch).argmax(-1)
    return sum(
        torch.equal(likeliest[row, begin - 1 : end - 1], batch[row, begin:end])
        for row, (_, (begin, end)) in enumerate(part)
    )
