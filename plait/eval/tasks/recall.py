"""Facts among sentences that do not matter, then questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.eval.conversation import TURN_SIZE, Conversation, size
from plait.eval.draw import Draw
from plait.eval.words import KINDS, NAMES, PLACES

WORD_KINDS = tuple(KINDS)


@dataclass(frozen=True, slots=True)
class Fact:
    statement: str
    question: str


def fact(kind: str, name: str, value: str) -> Fact:
    return Fact(f"The {kind} of {name} is {value}.", f"What is the {kind} of {name}?")


def facts(draw: Draw, count: int, kinds: Sequence[str]) -> list[Fact]:
    """Facts of which no two have the same kind and name."""
    owners: dict[tuple[str, str], None] = {}
    while len(owners) < count:
        owners[draw.choice(kinds), draw.choice(NAMES)] = None
    return [fact(kind, name, draw.value(kind, name)) for kind, name in owners]


def among_fillers(draw: Draw, statements: Sequence[str], length: int) -> str:
    """The statements in a random order, with sentences between them up to ``length`` tokens."""
    sentences = list(statements)
    left = length - sum(map(size, sentences))
    while left > 8:
        sentences.append(draw.filler())
        left -= size(sentences[-1])
    draw.random.shuffle(sentences)
    return " ".join(sentences)


def recall(draw: Draw, length: int, count: int, kinds: Sequence[str], questions: int = 1) -> Conversation:
    """``count`` facts in about ``length`` tokens, and questions about some, each in a turn of its own."""
    told = facts(draw, count, kinds)
    turn = TURN_SIZE + 2 * size(told[0].question)
    text = among_fillers(draw, [one.statement for one in told], length - questions * turn - 12)
    asked_for = draw.random.sample(told, min(questions, count))
    chat = Conversation()
    for index, asked in enumerate(asked_for):
        opening = f"Remember: {text}\n" if index == 0 else ""
        chat.user(opening + asked.question).assistant(asked.statement)
    return chat


def dense(draw: Draw, length: int, kinds: Sequence[str]) -> Conversation:
    """Facts without anything between them, then many questions; training text."""
    told = facts(draw, draw.random.randint(2, max(2, min(8, length // 50))), kinds)
    chat = Conversation().user("Remember: " + " ".join(one.statement for one in told))
    chat.assistant("Ok, I will remember.")
    left = length - size(chat.messages[0]["content"]) - 24
    while True:
        asked = draw.choice(told)
        chat.user(asked.question).assistant(asked.statement)
        left -= TURN_SIZE + 2 * size(asked.statement)
        if left < TURN_SIZE + 20:
            return chat


def track(draw: Draw, length: int, people: int) -> Conversation:
    """People who walk from room to room among fillers; the question is where one of them is now.

    Only the last move of a person counts, so that a state which lost or mixed up the order of what it read
    gives the wrong room. What is held out is the pair of person and last room.
    """
    names = draw.random.sample(NAMES, people)
    asked = draw.choice(names)
    last = draw.word(PLACES, "place", asked)
    moves = [_move(draw, names) for _ in range(draw.random.randint(2, 3) * people)]
    # After the deciding move the others may still walk.
    others = [_move(draw, names) for _ in range(draw.random.randint(0, 3))]
    moves += [(asked, last), *(move for move in others if move[0] != asked)]
    sentences = [f"{name} goes to the {place}." for name, place in moves]
    left = length - sum(map(size, sentences)) - 35
    while left > 8:
        filler = draw.filler()
        sentences.insert(draw.random.randint(0, len(sentences)), filler)
        left -= size(filler)
    text = " ".join(sentences)
    return Conversation().user(f"{text}\nWhere is {asked}?").assistant(f"{asked} is in the {last}.")


def _move(draw: Draw, names: Sequence[str]) -> tuple[str, str]:
    """Anybody to any room; in training text to none that is held out for him."""
    name = draw.choice(names)
    return name, draw.choice(PLACES) if draw.held else draw.word(PLACES, "place", name)
