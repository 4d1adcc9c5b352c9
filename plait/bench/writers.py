"""Random contents of a wanted length: token ids, or words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from plait.bench.workload import Content

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer

WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out so
what said up its about into than them can only other new some could time these two may then do first
any my now such like our over man me even most made after also did many before must through back years
where much your way well down should because each just those people how too little state good very make
world still own see men work long get here between both life being under never day same another know
while last might us great old year off come since against go came right used take three river stone
garden winter paper window letter music silver bridge harbour market doctor engine valley forest
""".split()  # noqa: SIM905 - a list of words reads better so


class TokenWriter:
    """Random token ids, for targets that take them. Lengths are exact.

    Args:
        vocab_size: ids lie below it.
        excluded: ids that are not drawn, such as special tokens.
    """

    def __init__(self, vocab_size: int, excluded: Iterable[int] = ()) -> None:
        self._ids = np.setdiff1d(np.arange(vocab_size), np.fromiter(excluded, dtype=np.int64))
        if not len(self._ids):
            raise ValueError(f"a vocabulary of {vocab_size} leaves no token to draw")

    def write(self, random: np.random.Generator, length: int) -> Content:
        return tuple(int(i) for i in random.choice(self._ids, size=length))


class WordWriter:
    """Random English words. With a tokenizer, as many as make the wanted number of tokens (to within one or
    two, where the cut falls into a word); without, one word for each token."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def write(self, random: np.random.Generator, length: int) -> Content:
        tokenizer = self._tokenizer
        text = " ".join(random.choice(WORDS, size=length))
        if tokenizer is None:
            return text
        tokens = tokenizer.encode(text, add_special_tokens=False)
        while len(tokens) < length:
            text += " " + " ".join(random.choice(WORDS, size=length))
            tokens = tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.decode(tokens[:length])


def length_of(content: Content, tokenizer: Tokenizer | None) -> int:
    """Tokens of a content; without a tokenizer, its words."""
    if isinstance(content, tuple):
        return len(content)
    return len(content.split()) if tokenizer is None else len(tokenizer.encode(content))
