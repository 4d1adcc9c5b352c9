"""Random choices on one side of the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import TypeVar

from plait.eval.split import held_out, held_out_of
from plait.eval.words import KINDS, STATES, SUBJECTS, TIMES

CODE_DIGITS = 4

T = TypeVar("T")


@cache
def _pool(words: tuple[str, ...], key: tuple[str, ...], held: bool) -> tuple[str, ...]:
    """The words that are on one side of the split as values of ``key``."""
    apart = held_out_of(words, key)
    return tuple(word for word in words if (word in apart) == held)


class Draw:
    """Draws what tasks are made of.

    Args:
        random: decides everything.
        held: draw held-out items only; else only items that are not held out.
    """

    def __init__(self, random: Random, held: bool):
        self.random = random
        self.held = held

    def choice(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def item(self, make: Callable[[], T], parts: Callable[[T], tuple[str, ...]]) -> T:
        """Make things until one is on this side of the split."""
        while True:
            made = make()
            if held_out(*parts(made)) == self.held:
                return made

    def code(self, digits: int = CODE_DIGITS) -> str:
        """Digits; as a code (four of them) on this side of the split."""
        count = 10**digits
        if digits != CODE_DIGITS:
            return f"{self.random.randrange(count):0{digits}d}"
        return self.item(lambda: f"{self.random.randrange(count):0{digits}d}", lambda code: ("code", code))

    def value(self, kind: str, owner: str) -> str:
        """A value of ``kind`` ("code" or a key of ``KINDS``) for ``owner``."""
        return self.code() if kind == "code" else self.word(KINDS[kind], kind, owner)

    def word(self, words: tuple[str, ...], *key: str) -> str:
        return self.choice(_pool(words, key, self.held))

    def sentence(self) -> str:
        """A sentence that says nothing of interest, without its stop and in lower case."""
        return f"{self.choice(SUBJECTS)} {self.choice(STATES)} {self.choice(TIMES)}"

    def filler(self) -> str:
        return capital(self.sentence()) + "."


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
