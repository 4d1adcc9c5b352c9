"""Which items are held out: decided by a hash of the item, so that training text and held-out
questions are apart by construction, whatever order or seed they are drawn with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_ONE_IN = 10


def held_out(*parts: str) -> bool:
    """Whether the item with these parts is one of the tenth that training never sees.

    An item is what a question is about: ("city", "Anna", "Rome"), ("code", "4821"), ("sum", "12", "34").
    """
    return _number(parts) % _ONE_IN == 0


def held_out_of(words: Sequence[str], key: Sequence[str]) -> frozenset[str]:
    """Of the few values that ``key`` may have, those that are held out with it: a tenth, and at least one."""
    return frozenset(sorted(words, key=lambda word: _number((*key, word)))[: -(-len(words) // _ONE_IN)])


def _number(parts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big")
