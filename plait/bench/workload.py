"""Sessions to send: prompts of given lengths, mixes, conversations, shared prefixes.

Every session is drawn from a generator of its own, seeded with (seed, its index): the same seed gives the
same prompts, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Content = str | tuple[int, ...]
"""A text, or token ids. One workload holds one kind."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and how many tokens of answer are asked for."""

    content: Content
    output_len: int


@dataclass(frozen=True, slots=True)
class Session:
    """What one user does, one turn after the other; each turn re-sends the history."""

    label: str
    turns: tuple[Turn, ...]
    system: Content | None = None


class Writer(Protocol):
    """Writes random contents."""

    def write(self, random: np.random.Generator, length: int) -> Content:
        """``length`` tokens, or close to it where the writer knows no tokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and answers, varied by ``spread``: uniform in length · [1 - spread, 1 + spread]."""

    input_len: int
    output_len: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if min(self.input_len, self.output_len) < 1 or not 0 <= self.spread < 1:
            raise ValueError(f"{self}: lengths are from 1 up, the spread from 0 to below 1")

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        return self._vary(random, self.input_len), self._vary(random, self.output_len)

    def _vary(self, random: np.random.Generator, length: int) -> int:
        reach = int(length * self.spread)
        return max(1, length + int(random.integers(-reach, reach + 1)))


def generator(seed: int, index: int) -> np.random.Generator:
    """The source of randomness of session ``index``."""
    return np.random.default_rng([seed, 0, index])


def single(writer: Writer, lengths: Lengths, count: int, seed: int) -> list[Session]:
    """``count`` unrelated prompts."""
    return [_one(writer, lengths, generator(seed, i), "all") for i in range(count)]


def _one(writer: Writer, lengths: Lengths, random: np.random.Generator, label: str) -> Session:
    input_len, output_len = lengths.draw(random)
    return Session(label, (Turn(writer.write(random, input_len), output_len),))


def mix(
    writer: Writer, short: Lengths, long: Lengths, share_long: float, count: int, seed: int
) -> list[Session]:
    """Short and long prompts, ``share_long`` of them long (to the nearest number), in random order.

    The number of long ones does not vary with the seed: runs compared with each other carry the same load.
    """
    if not 0 <= share_long <= 1:
        raise ValueError(f"--long-share {share_long:g}: it must be from 0 to 1")
    order = np.random.default_rng([seed, 2]).permutation(count)
    is_long = order < round(count * share_long)
    return [
        _one(writer, long if is_long[i] else short, generator(seed, i), "long" if is_long[i] else "short")
        for i in range(count)
    ]


def conversation(
    writer: Writer, system_len: int, lengths: Lengths, turns: int, count: int, seed: int
) -> list[Session]:
    """``count`` conversations of ``turns`` turns, each with a system prompt of its own (0 tokens: none)."""
    if turns < 1:
        raise ValueError(f"--turns {turns}: it must be from 1 up")
    sessions = []
    for i in range(count):
        random = generator(seed, i)
        system = writer.write(random, system_len) if system_len else None
        sizes = [lengths.draw(random) for _ in range(turns)]
        said = tuple(Turn(writer.write(random, size), answer) for size, answer in sizes)
        sessions.append(Session("all", said, system))
    return sessions


def shared_prefix(
    writer: Writer, prefix_len: int, lengths: Lengths, prefixes: int, count: int, seed: int
) -> list[Session]:
    """Prompts that begin with one of ``prefixes`` system prompts, in turn, and end in a tail of their own."""
    if min(prefix_len, prefixes) < 1:
        raise ValueError("--prefix-len and --num-prefixes must be from 1 up")
    systems = [writer.write(np.random.default_rng([seed, 3, group]), prefix_len) for group in range(prefixes)]
    tails = single(writer, lengths, count, seed)
    return [Session(s.label, s.turns, systems[i % prefixes]) for i, s in enumerate(tails)]


def warm_up(sessions: Sequence[Session]) -> list[Session]:
    """The first turns of ``sessions``, with answers of a few tokens.

    Draw them with another seed than the measured ones, or they put measured prompts into a prefix cache.
    """
    return [
        Session("warm-up", (Turn(s.turns[0].content, min(s.turns[0].output_len, 8)),), s.system)
        for s in sessions
    ]


def derive_seed(seed: int, *path: int) -> int:
    """A seed of its own for each ``path``, such as the number of a run."""
    return int(np.random.SeedSequence([seed, *path]).generate_state(1)[0])
