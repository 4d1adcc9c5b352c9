"""Log-probabilities in the shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from plait.engine.outputs import Logprob

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer

Candidates = dict[int, Logprob]


class LogprobFormatter:
    """Turns the engine's log-probabilities, keyed by token id, into JSON values.

    Without a tokenizer a token is shown as ``token_id:N``, since it has no text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def _bytes(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))

    def _entry(self, token: int, logprob: Logprob) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": _finite(logprob.logprob), "bytes": self._bytes(token)}

    def chat(self, tokens: Sequence[int], rows: Sequence[Candidates], top: int) -> dict[str, Any]:
        """``logprobs`` of a chat choice: one entry per token, each with its ``top`` best."""
        content = []
        for token, row in zip(tokens, rows, strict=True):
            best = [self._entry(t, p) for t, p in _best(row, top)]
            content.append(self._entry(token, row[token]) | {"top_logprobs": best})
        return {"content": content}

    def completion(
        self, tokens: Sequence[int], rows: Sequence[Candidates | None], top: int, offset: int
    ) -> dict[str, Any]:
        """``logprobs`` of a text completion; ``offset`` is where its text begins, in characters.

        A row of None is the first token of a prompt, which nothing predicts.
        """
        texts = [self.text(t) for t in tokens]
        offsets, chosen, tops = [], [], []
        for token, text, row in zip(tokens, texts, rows, strict=True):
            offsets.append(offset)
            offset += len(text)
            chosen.append(None if row is None else _finite(row[token].logprob))
            tops.append(None if row is None else self._top(token, row, top))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: int, row: Candidates, top: int) -> dict[str, float]:
        best = dict(_best(row, top)) | {token: row[token]}
        return {self.text(t): _finite(p.logprob) for t, p in best.items()}

    def prompt(self, rows: Iterable[Candidates | None]) -> list[dict[str, Any] | None]:
        """``prompt_logprobs``, as vLLM shows them: by token id."""
        return [None if row is None else {str(t): self._ranked(t, p) for t, p in row.items()} for row in rows]

    def _ranked(self, token: int, p: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": self.text(token)}


def _best(row: Candidates, top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` likeliest; the lower id first on a tie. A row may hold one more: the chosen token."""
    return sorted(row.items(), key=lambda item: (-item[1].logprob, item[0]))[:top]


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes -9999 for "never".
    return max(logprob, -9999.0)
