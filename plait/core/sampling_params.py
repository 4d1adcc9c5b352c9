"""What a request asks of the sampler and of the end of its answer.

Names, defaults and meanings are those of vLLM's ``SamplingParams``, so that callers can keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.core.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 64
"""Most alternatives per position that may be asked for."""


_MOST = 2**31
"""Token ids and counts are below this."""
_MOST_BIAS = 1e6
_NUMBERS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p",
)  # fmt: skip


def _refuse(name: str, value: object, holds: str) -> None:
    raise ValueError(f"{name}={value!r}: {holds}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Most tokens of reasoning, and how a model writes it, in token ids.

    Args:
        tokens: most tokens of reasoning; its tags do not count.
        closes: tokens that end it when the budget is spent. The last ``tag_tokens`` of them are the tag.
        ends: sequences of which each ends it.
        opens: the tag that begins it; empty: the answer begins inside.
    """

    tokens: int
    closes: tuple[int, ...]
    tag_tokens: int
    ends: tuple[tuple[int, ...], ...]
    opens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must look like once its reasoning is over.

    Args:
        grammar: as llguidance reads it.
        ends: sequences of tokens of which each ends the reasoning that the answer begins in; empty: the
            grammar begins at once.
        opens: a token that begins reasoning, if it is the answer's first; then ``ends`` end that.
        lead: tokens of white space, of which one may stand between the reasoning and what the grammar says.
        barred: tokens that may not come in the reasoning, such as those that would begin a call.
    """

    grammar: str
    ends: tuple[tuple[int, ...], ...] = ()
    opens: int | None = None
    lead: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        n: answers per prompt. Child ``i`` draws from (seed, i).
        temperature: 0 is greedy.
        top_k: most likely tokens kept; 0 or -1 keeps all.
        top_p: probability mass kept, in (0, 1].
        min_p: tokens below ``min_p`` times the highest probability are dropped.
        seed: fixes the random draws; without one the engine chooses it.
        stop: strings that end the answer; cut from the text unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the answer, besides the model's own.
        max_tokens: most tokens to generate; None means up to the model's length.
        min_tokens: no stop of any kind before this many tokens.
        logprobs: alternatives to report per generated token (the chosen token always comes too).
        prompt_logprobs: the same for prompt tokens; such a request does not read the prefix cache.
        logit_bias: token id to a number added to its logit.
        structured_outputs: what the answer must look like, after its reasoning.
        thinking_token_budget: most tokens of reasoning.
        thinking_budget, structure: what the two above come to for a model and a prompt; an engine sets them.

    Raises:
        ValueError: a value outside its range; the message names the field and the range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    thinking_budget: ThinkingBudget | None = None
    structure: Structure | None = None

    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)
    """``stop`` as a tuple, whatever form it was given in."""

    def __post_init__(self) -> None:
        self._check_types()
        stop = self.stop
        self.stop_strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            _refuse("stop", stop, "each must be a string of at least one character")
        if self.stop_strings and not self.detokenize:
            _refuse("stop", stop, "stop strings need detokenize=True")
        self.stop_token_ids = tuple(self.stop_token_ids or ())
        if any(not _is_int(t) or not 0 <= t < _MOST for t in self.stop_token_ids):
            _refuse("stop_token_ids", self.stop_token_ids, "token ids are integers from 0 up")
        if self.logit_bias is not None:
            try:
                self.logit_bias = {int(k): float(v) for k, v in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError):
                _refuse("logit_bias", self.logit_bias, "it maps token ids to numbers")
            assert self.logit_bias is not None
            if any(not 0 <= k < _MOST or not abs(v) <= _MOST_BIAS for k, v in self.logit_bias.items()):
                _refuse(
                    "logit_bias", self.logit_bias, f"token ids are from 0 up, biases at most {_MOST_BIAS:g}"
                )
        if not _is_int(self.n) or not 1 <= self.n <= 128:
            _refuse("n", self.n, "it must be an integer from 1 to 128")
        if not 0 <= self.temperature <= 100:
            _refuse("temperature", self.temperature, "it must be from 0 to 100")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "it must be above 0 and at most 1")
        if not _is_int(self.top_k) or self.top_k < -1:
            _refuse("top_k", self.top_k, "it must be an integer: -1 or 0 (all tokens), or from 1 up")
        self.top_k = max(self.top_k, 0)
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "it must be from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                _refuse(name, getattr(self, name), "it must be from -2 to 2")
        if not 0 < self.repetition_penalty <= 100:
            _refuse("repetition_penalty", self.repetition_penalty, "it must be above 0 and at most 100")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            _refuse("max_tokens", self.max_tokens, "it must be an integer from 1 up")
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            _refuse("min_tokens", self.min_tokens, "it must be an integer from 0 up")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"it must be at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not 0 <= value <= MAX_LOGPROBS):
                _refuse(name, value, f"it must be an integer from 0 to {MAX_LOGPROBS}")
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            _refuse("seed", self.seed, "it must be an integer of at most 64 bits")

        budget = self.thinking_token_budget
        if budget is not None and (not _is_int(budget) or not 0 <= budget < _MOST):
            _refuse("thinking_token_budget", budget, "it must be an integer from 0 up")
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            _refuse("structured_outputs", form, "it must be a StructuredOutputsParams(...)")
        if form is not None and self.structure is not None:
            _refuse("structured_outputs", form, "structure says the same; give one of them")

    def _check_types(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Sequence):
                _refuse(name, value, "it must be a list")
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                _refuse(name, value, "it must be a number")
        for name in ("top_k", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            if _is_int(value) and value >= _MOST:
                _refuse(name, value, f"it must be below {_MOST}")

    @property
    def greedy(self) -> bool:
        """No randomness: the highest logit, the lower id on a tie."""
        return self.temperature == 0
