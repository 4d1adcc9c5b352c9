"""Copying words and sorting digits."""

from __future__ import annotations

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw
from plait.eval.words import WORDS


def copying(draw: Draw, most: int = 10) -> Conversation:
    """Words, or a sentence, to be repeated."""

    def make() -> str:
        if draw.random.random() < 0.3:
            return draw.sentence()
        return " ".join(draw.choice(WORDS) for _ in range(draw.random.randint(3, most)))

    text = draw.item(make, lambda text: ("copy", text))
    return Conversation().user(f"Repeat: {text}").assistant(text)


def sorting(draw: Draw, most: int = 6) -> Conversation:
    """Digits to be put in order."""
    digits = draw.item(
        lambda: [draw.random.randrange(10) for _ in range(draw.random.randint(3, most))],
        lambda digits: ("sort", *map(str, digits)),
    )
    text, answer = (" ".join(map(str, order)) for order in (digits, sorted(digits)))
    return Conversation().user(f"Sort: {text}").assistant(answer)
