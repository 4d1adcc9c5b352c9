"""The kinds of held-out questions that the gate asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw
from plait.eval.tasks import calls, lists, recall, sums, talk


@dataclass(frozen=True, slots=True)
class Kind:
    """Args:
    name: as it is shown and chosen.
    about: what is asked.
    draw: makes one question with its answer.
    """

    name: str
    about: str
    draw: Callable[[Draw], Conversation]


def _recall(least: int, most: int, kinds: tuple[str, ...]) -> Callable[[Draw], Conversation]:
    def make(draw: Draw) -> Conversation:
        return recall.recall(draw, draw.random.randint(least, most), draw.random.randint(1, 3), kinds)

    return make


def _talk(draw: Draw) -> Conversation:
    return talk.talk(draw, draw.random.randint(60, 380))


def _track(draw: Draw) -> Conversation:
    return recall.track(draw, draw.random.randint(60, 250), draw.random.randint(1, 3))


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("words", "1 to 3 words among up to 500 tokens", _recall(60, 490, recall.WORD_KINDS)),
        Kind("codes", "1 to 3 four-digit codes among up to 200 tokens", _recall(60, 190, ("code",))),
        Kind("codes-long", "1 to 3 codes among 200 to 500 tokens", _recall(200, 490, ("code",))),
        Kind("track", "where somebody went last, up to 250 tokens", _track),
        Kind("talk", "what was said turns ago, up to 400 tokens", _talk),
        Kind("calls", "tool calls with short parameters", lambda draw: calls.call(draw, calls.SHORT)),
        Kind("calls-text", "tool calls with free text", lambda draw: calls.call(draw, calls.TEXT)),
        Kind("results", "saying what a tool returned", lambda draw: calls.call_and_answer(draw, calls.SHORT)),
        Kind("sums", "adding two-digit numbers, thinking", sums.addition),
        Kind("copy", "repeating words", lists.copying),
        Kind("sort", "sorting digits", lists.sorting),
    )
}


def questions(kind: str, count: int, seed: int = 0) -> list[Conversation]:
    """Held-out questions of one kind, each with its answer as the last message.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    draw = Draw(Random(f"{kind} {seed}"), held=True)
    return [KINDS[kind].draw(draw) for _ in range(count)]
