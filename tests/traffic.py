"""One list of requests of every kind, and a client that sends it and gathers what comes back.

Prompts of 1 to 3,000 tokens, some with common beginnings, conversations whose turns repeat what was said
before; greedy and drawn answers, stop strings, stop tokens, clients that hang up.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpoints import VOCAB
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from plait.core.sampling_params import SamplingParams
from plait.text.answer import AnswerText
from plait.text.detokenizer import CHAR_OF_BYTE
from plait.text.tokenizer import Tokenizer

OPENING = (5, 9, 17)
"""The generation prompt of the conversations."""


@dataclass(frozen=True)
class Ask:
    """A request. ``after``: it goes on from another one's prompt and answer, once that has ended."""

    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    after: int | None = None
    thinking: int = 0
    """answer tokens of ``after`` that the history does not repeat; 0: it repeats everything, word for word"""
    in_chat: bool = False
    hang_up: int | None = None
    """answer tokens after which the client hangs up; 0: soon after it was sent"""
    crowd: bool = False
    """one of those that arrive together and outgrow the memory that they were admitted to"""


def tokenizer() -> Tokenizer:
    """One with a text for each of the tiny models' tokens: single bytes, then pairs of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz" + CHAR_OF_BYTE[0x20]
    texts = [
        "<pad>",
        "<s>",
        "</s>",
        *CHAR_OF_BYTE.values(),
        *map("".join, itertools.product(letters, repeat=2)),
    ]
    texts += map("".join, itertools.product("aeiou", repeat=3))
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(texts[:VOCAB])}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def requests(count: int, longest: int, most_answer: int, seed: int = 1) -> list[Ask]:
    """``count`` requests: 4 in 10 share a beginning with others, about 1 in 6 is a turn of a conversation."""
    draw = random.Random(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCAB) for _ in range(n))

    def length(most: int = longest) -> int:
        return round(math.exp(draw.uniform(0, math.log(most))))

    edges = [n for n in (1, 15, 16, 17, 31, 32, 33, 64, 65, longest) if n <= longest]
    stems = [tokens(n) for n in (longest // 2, longest // 5, longest // 12, 37)]
    turns = count // 6 // 4 * 4
    siblings = round(0.4 * count)
    talkers = count // 8
    asks: list[Ask] = []
    for i in range(siblings):
        stem = stems[i % len(stems)]
        kept = stem if i % 3 else stem[: draw.randrange(1, len(stem))]  # forks where nobody marked one
        asks.append(Ask(kept + tokens(length(longest // 6)), *_way(draw, most_answer)))
    for i in range(count - siblings - turns - talkers):
        n = edges[i] if i < len(edges) else length()
        asks.append(Ask(tokens(n), *_way(draw, most_answer, short=n < 150)))
    asks = [_sometimes_hung_up(ask, draw) for ask in asks]
    draw.shuffle(asks)
    most = max(160, 6 * most_answer)
    crowd = [
        Ask(tokens(length(50)), _talk(most, i), draw.randrange(2**64), crowd=True) for i in range(talkers)
    ]
    asks[5:5] = crowd
    for i in range(turns):
        first = i % 4 == 0
        system = stems[2] if first else ()
        asks.append(
            Ask(
                system + tokens(length(longest // 10)) + OPENING,
                *_way(draw, most_answer),
                after=None if first else len(asks) - 1,
                thinking=draw.choice((0, 0, 2)),
                in_chat=True,
            )
        )
    return asks


def _sometimes_hung_up(ask: Ask, draw: random.Random) -> Ask:
    if draw.random() > 0.12:
        return ask
    return Ask(ask.tokens, ask.params, ask.seed, hang_up=draw.choice((0, 1, 3, 6)))


def _way(draw: random.Random, most: int, short: bool = False) -> tuple[SamplingParams, int]:
    """How to sample, and the seed."""
    given: dict[str, Any] = {
        "temperature": draw.choice((0, 0.8)),
        "max_tokens": draw.randint(1, most),
        "logprobs": draw.choice((0, 0, 1, 3)),
        "ignore_eos": draw.random() < 0.5,
    }
    if given["temperature"]:
        given |= draw.choice(({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}))
    match draw.randrange(8):
        case 0 | 1:
            given["stop"] = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=2)) for _ in range(40)]
            given["include_stop_str_in_output"] = draw.random() < 0.5
        case 2:
            given["stop_token_ids"] = [draw.randrange(3, VOCAB) for _ in range(60)]
            given["min_tokens"] = min(2, given["max_tokens"])
        case 3:
            given |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        case 4:
            given["logit_bias"] = {draw.randrange(3, VOCAB): draw.choice((-5.0, 5.0)) for _ in range(5)}
        case 5 if short:
            given["prompt_logprobs"] = 1
    return SamplingParams(**given), draw.randrange(2**64)


def _talk(tokens: int, i: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (i % 2), max_tokens=tokens, logprobs=0, ignore_eos=True)


@dataclass
class Said:
    """What a client has of one answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop: int | str | None = None
    prompt_logprobs: Any = None
    cached: int = 0


class Listener:
    """The client's end of one answer: text, stop strings, hanging up."""

    def __init__(self, ask: Ask, prompt: Sequence[int], tokens: Tokenizer) -> None:
        self.ask = ask
        self.prompt = list(prompt)
        self.said = Said()
        self._text = AnswerText(tokens, prompt, ask.params)

    @property
    def over(self) -> bool:
        return self.said.reason is not None

    def take(self, progress: Any) -> bool:
        """Take in a step's progress. Whether the client hangs up now: the engine does not know yet."""
        said = self.said
        said.cached = progress.num_cached_tokens
        said.prompt_logprobs = said.prompt_logprobs or progress.prompt_logprobs
        for i, token in enumerate(progress.tokens):
            last = i == len(progress.tokens) - 1 and progress.finish_reason == "stop"
            visible = not last or self.ask.params.include_stop_str_in_output
            piece = self._text.push(token, progress.logprobs[i], visible=visible)
            if self._add(piece):
                return progress.finish_reason is None
        if progress.finish_reason is not None:
            if not self._add(self._text.finish()):
                said.reason, said.stop = progress.finish_reason, progress.stop_reason
            return False
        if self.ask.hang_up and len(said.tokens) >= self.ask.hang_up:
            said.reason = "abort"
            return True
        return False

    def _add(self, piece: Any) -> bool:
        self.said.text += piece.text
        self.said.tokens += [token for token, _ in piece.tokens]
        self.said.logprobs += [entry for _, entry in piece.tokens]
        if piece.stopped is not None:
            self.said.reason, self.said.stop = "stop", piece.stopped
        return piece.stopped is not None


def prompt_of(ask: Ask, prompts: Sequence[Sequence[int]], said: Sequence[Said]) -> list[int]:
    """The tokens of a request's prompt. Histories whose thinking is stripped lack the opening, too."""
    if ask.after is None:
        return list(ask.tokens)
    before, answer = prompts[ask.after], said[ask.after].tokens
    if ask.thinking:
        return [*before[: -len(OPENING)], *answer[ask.thinking :], *ask.tokens]
    return [*before, *answer, *ask.tokens]


def in_order(asks: Sequence[Ask], order: str, seed: int = 3) -> Iterator[list[int]]:
    """Requests to send before each step; turns go when the one before has ended, whatever the order."""
    first = [i for i, ask in enumerate(asks) if ask.after is None]
    if order == "reversed":
        first.reverse()
    elif order != "together":
        crowd = [i for i in first if asks[i].crowd]
        first = [i for i in first if not asks[i].crowd]
        random.Random(seed).shuffle(first)
        first[len(first) // 3 : len(first) // 3] = crowd
    if order in ("together", "reversed"):
        yield first
    elif order == "one by one":
        for i in first:
            yield [i]
            yield []
    else:
        for begin in range(0, len(first), 24):
            yield first[begin : begin + 24]
            yield from [[]] * 40
