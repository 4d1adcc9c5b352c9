"""What is trained, in which order, and what must be reached before the next stage begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw
from plait.eval.tasks import calls, drills, lists, recall, sums, talk
from plait.eval.tasks.about import about

Task = Callable[[Draw, int], Conversation]
"""Draws one conversation of at most about so many tokens."""

CODES = ("code",)
MIXED = ("code", "code", *recall.WORD_KINDS)


def _length(draw: Draw, most: int) -> int:
    return draw.random.randint(min(60, most), most)


def _recall(draw: Draw, most: int) -> Conversation:
    kinds = draw.choice((CODES, recall.WORD_KINDS, MIXED))
    length = _length(draw, most - 10)
    count = draw.random.randint(1, min(8, 2 + length // 64))
    return recall.recall(draw, length, count, kinds, draw.random.randint(1, 4 if length > 150 else 2))


def _dense(draw: Draw, most: int) -> Conversation:
    return recall.dense(draw, _length(draw, min(most, 400)) + 20, draw.choice((CODES, MIXED)))


def _talk(draw: Draw, most: int) -> Conversation:
    return talk.talk(draw, _length(draw, most), final=draw.random.random() < 0.3)


def _track(draw: Draw, most: int) -> Conversation:
    return recall.track(draw, _length(draw, min(most, 300)), draw.random.randint(1, 4))


def _calls(draw: Draw, most: int) -> Conversation:
    uses = draw.choice((calls.SHORT, calls.TEXT, calls.SHORT + calls.TEXT))
    if draw.random.random() < 0.5:
        return calls.call(draw, uses)
    return calls.call_and_answer(draw, uses, draw.random.randint(1, 1 + most // 256))


TASKS: Mapping[str, Task] = {
    "drill words": lambda draw, most: drills.words(draw, min(most, 256)),
    "drill digits": lambda draw, most: drills.digits(draw, min(most, 256)),
    "recall": _recall,
    "dense": _dense,
    "talk": _talk,
    "track": _track,
    "calls": _calls,
    "copy": lambda draw, most: lists.copying(draw),
    "sort": lambda draw, most: lists.sorting(draw),
    "sums": lambda draw, most: sums.addition(draw),
    "about": lambda draw, most: about(draw),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Args:
    length: tokens of a training sequence.
    batch: tokens of one step, over all processes.
    shares: how often each task is drawn.
    goals: accuracies on the evaluation that end the stage.
    least, most: tokens after which it may, and does, end.
    """

    name: str
    length: int
    batch: int
    shares: Mapping[str, float]
    goals: Mapping[str, float]
    least: int
    most: int


_EVERYTHING = {
    "drill words": 5, "drill digits": 5, "recall": 24, "dense": 8, "talk": 18, "track": 9, "calls": 16,
    "copy": 3, "sort": 3, "sums": 5, "about": 4,
}  # fmt: skip
_WHAT_IS_HARD = {
    "drill words": 2, "drill digits": 3, "recall": 24, "dense": 8, "talk": 15, "track": 12, "calls": 16,
    "copy": 6, "sort": 6, "sums": 14, "about": 4,
}  # fmt: skip

STAGES: tuple[Stage, ...] = (
    Stage(
        "words", 128, 1024,
        {"drill words": 55, "drill digits": 8, "recall": 6, "dense": 6, "talk": 3, "track": 3, "calls": 7,
         "copy": 3, "sort": 2, "sums": 4, "about": 3},
        {"words": 0.8}, 300_000, 4_000_000,
    ),
    Stage(
        "digits", 192, 1536,
        {"drill words": 10, "drill digits": 36, "recall": 12, "dense": 10, "talk": 6, "track": 4, "calls": 9,
         "copy": 3, "sort": 2, "sums": 5, "about": 3},
        {"codes 100": 0.7}, 300_000, 4_000_000,
    ),
    Stage("mix", 256, 4096, _EVERYTHING, {"codes 200": 0.85, "talk 200": 0.8}, 2_000_000, 8_000_000),
    Stage("long", 512, 4096, _EVERYTHING, {"codes 500": 0.8, "talk 400": 0.85}, 4_000_000, 14_000_000),
    Stage("longest", 1024, 4096, _EVERYTHING, {}, 800_000, 800_000),
    Stage("last", 1024, 4096, _WHAT_IS_HARD, {}, 0, 1_000_000_000),
)  # fmt: skip


def draw_conversation(random: Random, stage: Stage) -> Conversation:
    """A conversation for training: nothing in it is held out."""
    (name,) = random.choices(tuple(stage.shares), tuple(stage.shares.values()))
    return TASKS[name](Draw(random, held=False), stage.length)
