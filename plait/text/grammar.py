"""Grammars, compiled for a model's tokens: off the path of the steps, once for each, within limits."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from plait.text.tokenizer import Tokenizer

MOST_BYTES = 512 * 1024
"""Longest grammar, with what compiling it needs to know."""
_KEPT = 128
"""Compiled grammars kept for the next request."""
_THREADS = 2
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=1_000_000, verbose_errors=False)
"""About 100 MB at most for each grammar; compiling ends within a second, the next token within some 10 ms (a
place of the grammar that no answer has come to yet: 60 ms at most)."""


_ONE_OF = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "oneOf is served where no value can fit two of its branches; write anyOf where that does not matter",
)
"""Advice about a setting that clients do not have, and advice that they can follow."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


class _Vocabulary:
    """A model's tokens as the library wants them: their bytes, in order of their ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        ends = [i for i in end_token_ids if i < vocab_size]
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends})

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return self._tokenizer.encode(text, add_special_tokens=False)


class Grammars:
    """Compiles grammars in threads of its own, and keeps those that were asked for last.

    Args:
        tokenizer: gives the model's tokenizer; called once, for the first grammar.
        vocab_size: columns of the model's logits.
        end_token_ids: ids that end an answer. They may come where a grammar may stop, and nowhere else.
    """

    def __init__(
        self, tokenizer: Callable[[], Tokenizer | None], vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._ends = [i for i in end_token_ids if 0 <= i < vocab_size]
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def submit(self, grammar: str) -> Future[LLMatcher]:
        """The compiled grammar, at its beginning (copy it to use it), or the GrammarError that it is."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_THREADS, "grammar")
                known = self._kept[grammar] = self._pool.submit(self._compile, grammar)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return known

    def forget(self, grammar: str) -> None:
        """Compile it anew for the next request: its copies share what went beyond the limits."""
        with self._lock:
            self._kept.pop(grammar, None)

    def holds(self, grammar: str) -> bool:
        """Whether a grammar can be compiled; waits for it."""
        try:
            self.submit(grammar).result()
        except GrammarError:
            return False
        return True

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar.encode()) > MOST_BYTES:
            raise GrammarError(f"it is longer than {MOST_BYTES // 1024} KiB")
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        matcher.compute_bitmask()  # what every answer begins with is then known to all copies
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return matcher

    def _tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokens is None:
                tokenizer = self._load()
                if tokenizer is None:
                    raise GrammarError("there is no tokenizer (skip_tokenizer_init)")
                if not self._ends:
                    raise GrammarError("the model has no token that ends an answer")
                vocabulary = _Vocabulary(tokenizer, self._vocab_size, self._ends)
                self._tokens = LLTokenizer(
                    TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._ends
                )
            return self._tokens

    def close(self) -> None:
        """Start nothing more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _reason(error: str) -> str:
    """The first lines of the library's message, on one line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return "; ".join(lines).replace(*_ONE_OF)[:500]
