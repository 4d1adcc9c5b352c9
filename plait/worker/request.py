"""What the worker remembers of a request between steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from plait.core.plan import Admission
from plait.worker.structure import Matcher, StructureState
from plait.worker.thinking import ThinkingState


class TokenCounts:
    """How often each token was generated, for the tokens that were seen at all, the prompt's included.

    ``ids`` int64 [n] and ``counts`` float32 [n] grow by one entry per new token; a step costs O(1), not
    the length of the text.
    """

    def __init__(self, prompt: Iterable[int], answer: Iterable[int]) -> None:
        seen = dict.fromkeys(prompt)
        self._slot = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.fromiter(seen, dtype=np.int64, count=len(seen))
        self._counts = np.zeros(len(seen), dtype=np.float32)
        for token in answer:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more generated token."""
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            grown = max(64, 2 * slot)
            self._ids = np.resize(self._ids, grown)
            self._counts = np.concatenate([self._counts, np.zeros(grown - slot, dtype=np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slot)]


class RequestState:
    """Sampling parameters, tokens and token counts of one admitted request.

    Steps are prepared ahead of those that run: ``length`` belongs to whoever prepares; ``tokens``, ``counts``
    and ``failed`` to whoever runs, so that what a row is sampled with is as late as its logits.

    Ids outside the vocabulary (in ``logit_bias``, stop ids, end ids) cannot be sampled and have no effect.

    Args:
        admission: of the request.
        vocab_size: columns of the logits.
        matcher: of the request's grammar, if it has a structure; this request's own.
    """

    def __init__(self, admission: Admission, vocab_size: int, matcher: Matcher | None = None) -> None:
        params = admission.params
        self.params = params
        self.request_id = admission.request_id
        self.seed = admission.seed
        self.tokens = list(admission.tokens)
        self.length = len(self.tokens)
        """tokens once all prepared steps have run"""
        self.failed = False
        """no token could be chosen for it: what was prepared for it comes to nothing"""
        self.num_prompt_tokens = admission.num_prompt_tokens

        bias = {t: b for t, b in (params.logit_bias or {}).items() if t < vocab_size}
        self.bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        ends = {*admission.end_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
        self.barred_ids = np.array(sorted(t for t in ends if 0 <= t < vocab_size), dtype=np.int64)

        self.thinking: ThinkingState | None = None
        if params.thinking_budget is not None:
            self.thinking = ThinkingState(params.thinking_budget, self.tokens[self.num_prompt_tokens :])

        self.structure: StructureState | None = None
        if params.structure is not None:
            assert matcher is not None
            ends = set(admission.end_token_ids) - set(params.stop_token_ids or ())
            answer = self.tokens[self.num_prompt_tokens :]
            self.structure = StructureState(params.structure, matcher, vocab_size, ends, answer)

        self.penalised = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self.counts: TokenCounts | None = None
        if self.penalised:
            prompt = self.tokens[: self.num_prompt_tokens]
            self.counts = TokenCounts(prompt, self.tokens[self.num_prompt_tokens :])

    def append(self, token: int) -> None:
        """Take a sampled token."""
        self.tokens.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if self.thinking is not None:
            self.thinking.append(token)
        if self.structure is not None:
            self.structure.append(token)

    @property
    def forced_token(self) -> int | None:
        """The token that must come next, whatever the logits say."""
        return self.thinking.forced if self.thinking is not None else None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def bars_end(self) -> bool:
        """The tokens that end the answer may not come yet, unless nothing else can."""
        if self.num_generated >= self.params.min_tokens or not len(self.barred_ids):
            return False
        return self.structure is None or self.structure.allows_beyond(self.barred_ids)

    @property
    def adjusts_logits(self) -> bool:
        return self.penalised or len(self.bias) > 0 or self.structure is not None or self.bars_end
