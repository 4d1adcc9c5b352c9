"""Conversations of many turns, in which something is told and asked for later."""

from __future__ import annotations

from plait.eval.conversation import TURN_SIZE, Conversation, size
from plait.eval.draw import Draw
from plait.eval.tasks.about import question
from plait.eval.tasks.recall import WORD_KINDS, facts
from plait.eval.tasks.sums import addition
from plait.eval.words import CITIES, COLORS, FOODS, PETS, THINGS

OWN: dict[str, tuple[str, ...] | None] = {
    "password": THINGS, "pin": None, "phone number": None, "secret word": THINGS, "city": CITIES,
    "favorite color": COLORS, "favorite food": FOODS, "pet": PETS, "locker code": None,
}  # fmt: skip
"""What the user may tell of himself, and its values; None: a code."""

Told = dict[str, tuple[str, str]]
"""What was told, by what it is about: the question and the answer."""


def talk(draw: Draw, length: int, final: bool = True) -> Conversation:
    """About ``length`` tokens of turns; ``final``: ends with a question about something that was told.

    Otherwise questions come whenever, which is training text.
    """
    chat = Conversation()
    told: Told = {}
    left = length - (30 if final else 0)
    while left > 25 or not told:
        before = len(chat.messages)
        _turn(draw, chat, told, ask=not final)
        left -= sum(size(m["content"]) for m in chat.messages[before:]) + TURN_SIZE
    if final:
        _ask(draw, chat, told)
    return chat


def _turn(draw: Draw, chat: Conversation, told: Told, ask: bool) -> None:
    chance = draw.random.random()
    if chance < 0.35 or not told:
        _tell(draw, chat, told)
    elif chance < 0.65 and ask:
        _ask(draw, chat, told)
    elif chance < 0.8:
        asked, answer = question(draw)
        chat.user(asked).assistant(answer)
    elif chance < 0.88:
        # Reasoning is not part of the history, and a sum without it is more than the model can do.
        question_, answer_ = addition(draw).messages
        chat.recited.add(len(chat.messages) + 1)
        chat.user(question_["content"]).assistant(answer_["content"])
    else:
        chat.user(f"Note: {draw.filler()} {draw.filler()}").assistant("Noted.")


def _tell(draw: Draw, chat: Conversation, told: Told) -> None:
    """Something new; nothing is told twice, so that every question has one answer."""
    for _ in range(8):
        if draw.random.random() < 0.6:
            key = draw.choice(tuple(OWN))
            words = OWN[key]
            value = draw.code() if words is None else draw.word(words, "own", key)
            statement, pair = f"My {key} is {value}.", (f"What is my {key}?", f"Your {key} is {value}.")
        else:
            fact = facts(draw, 1, ("code", *WORD_KINDS))[0]
            key, statement, pair = fact.question, fact.statement, (fact.question, fact.statement)
        if key not in told:
            told[key] = pair
            opening = draw.choice(("", "", "Remember: "))
            chat.user(opening + statement).assistant("Ok, I will remember.")
            return


def _ask(draw: Draw, chat: Conversation, told: Told) -> None:
    asked, answer = draw.choice(tuple(told.values()))
    chat.user(asked).assistant(answer)
