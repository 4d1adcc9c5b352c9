"""Answers that follow a grammar.

What may come next is a function of the answer's tokens alone, and is asked for when a row is sampled. So it
does not depend on how steps were scheduled, and an answer that resumes after a preemption finds itself where
it was.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from plait.core.sampling_params import Structure


class Matcher(Protocol):
    """Follows a text through a grammar, token by token (``llguidance.LLMatcher``)."""

    def deep_copy(self) -> Matcher: ...

    def consume_token(self, sampled_token: int) -> bool:
        """Whether the grammar has a place for the token; if not, it is in error from then on."""
        ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of the tokens the grammar has a place for; nothing is consumed."""
        ...

    def compute_bitmask(self) -> bytes:
        """One bit per token that may come next, the lowest first; in error those of the ends alone."""
        ...

    def is_error(self) -> bool:
        """Whether the text left the grammar, or its limits."""
        ...


class _Part(enum.Enum):
    """Of an answer."""

    FRONT = enum.auto()
    """reasoning may begin here, or the grammar"""
    REASONING = enum.auto()
    LEAD = enum.auto()
    """white space may come before the grammar's text"""
    GRAMMAR = enum.auto()


class StructureState:
    """Follows one answer token by token.

    Args:
        structure: what was asked.
        matcher: of its grammar, at the beginning; this answer's own.
        vocab_size: columns of the logits.
        ends: ids that end the answer; reasoning is not the end of one.
        answer: tokens that were generated already.
    """

    def __init__(
        self,
        structure: Structure,
        matcher: Matcher,
        vocab_size: int,
        ends: Iterable[int],
        answer: Iterable[int] = (),
    ) -> None:
        self._structure = structure
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._barred = [t for t in {*ends, *structure.barred} if 0 <= t < vocab_size]
        self._part = _Part.GRAMMAR
        if structure.opens is not None:
            self._part = _Part.FRONT
        elif structure.ends:
            self._part = _Part.REASONING
        self._recent: list[int] = []
        self._longest = max(map(len, structure.ends), default=0)
        self._allowed: np.ndarray | None = None
        for token in answer:
            self.append(token)

    @property
    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [V]. None may when the grammar has outgrown its limits."""
        if self._allowed is None:
            self._allowed = self._find_allowed()
        return self._allowed

    def _find_allowed(self) -> np.ndarray:
        if self._part is _Part.REASONING:
            allowed = np.ones(self._vocab_size, dtype=bool)
            allowed[self._barred] = False
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        if self._matcher.is_error():  # an end here would pass half an answer off as a whole one
            return np.zeros(self._vocab_size, dtype=bool)
        if self._part is _Part.LEAD:
            allowed[list(self._structure.lead)] = True
        elif self._part is _Part.FRONT:
            allowed[self._structure.opens] = True
        return allowed

    def allows_beyond(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Whether any token may come next that is none of ``ids``."""
        allowed = self.allowed
        return int(np.count_nonzero(allowed)) > int(np.count_nonzero(allowed[ids]))

    def append(self, token: int) -> None:
        """One more token of the answer."""
        self._allowed = None
        if self._part is _Part.REASONING:
            self._recent = [*self._recent, token][-self._longest :]
            if any(tuple(self._recent[-len(end) :]) == end for end in self._structure.ends):
                self._part = _Part.LEAD
            return
        if self._part is _Part.FRONT and token == self._structure.opens:
            self._part = _Part.REASONING
            return
        led, self._part = self._part is _Part.LEAD, _Part.GRAMMAR
        if led and token in self._structure.lead and not self._matcher.validate_tokens([token]):
            return
        self._matcher.consume_token(token)
