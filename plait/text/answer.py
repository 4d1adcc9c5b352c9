"""The text of one answer while it grows: detokenisation, stop strings, and which tokens belong to it.

The text is a string of characters numbered from 0, of which three bounds matter::

    0            released          decoded
    |---------------|-----------------|..............
       handed out        held back      bytes of an incomplete character

Characters are held back only while they may be the beginning of a stop string. Bounds never move back, so
nothing handed out is ever retracted. Each token has the number of its first character, and is handed out
together with that character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.core.sampling_params import SamplingParams
from plait.text.stop_strings import StopMatcher
from plait.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """What an answer grew by."""

    text: str = ""
    tokens: list[tuple[int, Any]] = field(default_factory=list)
    """(token id, payload) of the tokens handed out with this text, in order"""
    starts: list[int] = field(default_factory=list)
    """for each of them, the number of its first character in the answer (empty without detokenisation)"""
    stopped: str | None = None
    """the stop string that ended the answer; nothing may be pushed after it"""


class AnswerText:
    """Turns the token ids of one answer into increments of text.

    The increments add up to ``tokenizer.decode(answer_ids, params.skip_special_tokens)``, up to a stop
    string. After a prompt with text the answer continues that text: SentencePiece's leading space, which
    decoding strips from the front of a text, stays.

    A token without text of its own (a hidden special token) is handed out with the next token that has some,
    or at the end. Tokens whose text lies wholly behind the cut of a stop string are dropped, with all that
    follow them.

    Args:
        tokenizer: of the model; may be None if ``params.detokenize`` is False.
        prompt_ids: the prompt; only whether it has text matters.
        params: ``stop_strings``, ``min_tokens``, ``include_stop_str_in_output``, ``skip_special_tokens`` and
            ``detokenize`` are read. No stop string may begin within the first ``min_tokens`` tokens.
        shown_ids: special tokens that are part of the text all the same, as tags that a parser looks for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._detokenize = params.detokenize
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(params.stop_strings) if params.stop_strings else None
        self._count = 0
        self._ended = False
        if not params.detokenize:
            return
        if tokenizer is None:
            raise ValueError("there is no tokenizer to make text with; set detokenize=False")
        self._rules = tokenizer.detokenizer
        hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._hidden = hidden.difference(shown_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._rules.errors)
        self._at_front = bool(self._rules.strip) and not self._has_text(prompt_ids, tokenizer.special_ids)
        self._decoded = 0
        self._released = 0
        self._search_from = 0
        self._held = ""
        self._silent: list[tuple[int, Any]] = []
        self._waiting: deque[tuple[int, list[tuple[int, Any]]]] = deque()
        """(first character, tokens) per token with text not yet handed out; hidden ones ride before it"""

    def _has_text(self, token_ids: Sequence[int], special_ids: frozenset[int]) -> bool:
        return any(i not in special_ids and self._rules.token_bytes(i) for i in token_ids)

    def push(self, token_id: int, payload: Any = None, visible: bool = True) -> Piece:
        """Add one token. ``visible=False`` leaves its text out (for a token that ends the answer).

        Raises:
            RuntimeError: the answer has ended.
        """
        if self._ended:
            raise RuntimeError("the answer has ended, by a stop string or by finish(); push no more tokens")
        self._count += 1
        if not self._detokenize:
            return Piece(tokens=[(token_id, payload)])
        data = b"" if not visible or token_id in self._hidden else self._rules.token_bytes(token_id)
        if data and self._at_front:
            self._at_front = False
            data = self._rules.strip_front(data)
        self._silent.append((token_id, payload))
        if data:
            self._waiting.append((self._first_character(data), self._silent))
            self._silent = []
        piece = self._grow(self._decoder.decode(data))
        if self._count == self._min_tokens:
            self._search_from = self._decoded + bool(self._pending())
        return piece

    def finish(self) -> Piece:
        """End the answer: hand out all that is held back. An incomplete character becomes U+FFFD."""
        if self._ended or not self._detokenize:
            self._ended = True
            return Piece()
        piece = self._grow(self._decoder.decode(b"", True))
        if piece.stopped is None:
            self._ended = True
            rest = self._release(self._decoded)
            tokens = piece.tokens + rest.tokens + self._silent
            starts = piece.starts + rest.starts + [self._decoded] * len(self._silent)
            piece = Piece(piece.text + rest.text, tokens, starts)
        return piece

    def _pending(self) -> bytes:
        """Bytes of the character that is not complete yet (at most 3)."""
        return self._decoder.getstate()[0]

    def _first_character(self, data: bytes) -> int:
        """Number of the character in which the first byte of ``data`` lies."""
        pending = self._pending()
        if not pending:
            return self._decoded
        probe = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            probe.decode(pending + data[:1])
        except UnicodeDecodeError:
            # The pending bytes stay alone: they become U+FFFD, and ``data`` begins after that.
            return self._decoded + len(pending.decode("utf-8", self._rules.errors))
        return self._decoded

    def _grow(self, text: str) -> Piece:
        """Take in newly decoded characters; hand out all that no stop string can claim any more."""
        begin = self._decoded
        self._held += text
        self._decoded += len(text)
        if self._matcher is None or self._count <= self._min_tokens:
            return self._release(self._decoded)
        skipped = min(max(self._search_from - begin, 0), len(text))
        match = self._matcher.feed(text[skipped:])
        if match is None:
            return self._release(self._decoded - self._matcher.held)
        string, count = match
        end = begin + skipped + count
        return self._stop(string, end if self._include_stop else end - len(string))

    def _release(self, bound: int) -> Piece:
        """Hand out the characters before ``bound`` and the tokens that begin before it."""
        size = bound - self._released
        if size <= 0:
            return Piece()
        text, self._held = self._held[:size], self._held[size:]
        self._released = bound
        piece = Piece(text)
        while self._waiting and self._waiting[0][0] < bound:
            start, tokens = self._waiting.popleft()
            piece.tokens += tokens
            piece.starts += [start] * len(tokens)
        return piece

    def _stop(self, string: str, cut: int) -> Piece:
        """End the answer at character ``cut``."""
        self._ended = True
        piece = self._release(cut)
        # Hidden tokens before the first token that is cut are part of the answer.
        tail = self._waiting[0][1][:-1] if self._waiting else self._silent
        return Piece(piece.text, piece.tokens + tail, piece.starts + [cut] * len(tail), string)
