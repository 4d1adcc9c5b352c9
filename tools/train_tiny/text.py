"""Conversations as token ids, with the parts that are learnt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from plait.eval.conversation import Conversation
from plait.text.chat import ChatTemplate
from tools.train_tiny.stages import Stage, draw_conversation

TEMPLATE = ChatTemplate(Path(__file__).with_name("chat_template.jinja").read_text())
CONTEXT_WEIGHT = 0.05
"""Weight of the loss on what is not an answer: enough to learn the language of prompts."""


def render(chat: Conversation) -> str:
    return TEMPLATE.render(chat.messages, tools=chat.tools, add_generation_prompt=False)


class Encoder:
    """Renders and tokenises; finds the answers."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.start, self.end, self.stop, self.think, self.assistant, self.line = (
            tokenizer.token_to_id(token)
            for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "assistant", "Ċ")
        )

    def encode(self, chat: Conversation) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and where the answer of each assistant message begins and ends, end token included."""
        ids = self.tokenizer.encode(render(chat)).ids
        return ids, list(self._answers(ids))

    def _answers(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        at = 0
        while at < len(ids):
            if ids[at] == self.start and ids[at + 1] == self.assistant:
                begin = at + 3  # behind the line's end
                if ids[begin] == self.think:
                    begin += 2  # the generation prompt opens the reasoning
                at = ids.index(self.end, begin)
                yield begin, at + 1
            at += 1

    def document(self, chat: Conversation) -> tuple[list[int], list[float]]:
        """Token ids and the weight of each one's loss, closed by the end of the text."""
        ids, answers = self.encode(chat)
        weights = [CONTEXT_WEIGHT] * len(ids)
        places = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        for place, (begin, end) in zip(places, answers, strict=True):
            weight = 0.0 if place in chat.recited else 1.0
            weights[begin:end] = [weight] * (end - begin)
        return [*ids, self.stop], [*weights, CONTEXT_WEIGHT]


def rows(encoder: Encoder, stage: Stage, count: int, seed: str) -> tuple[np.ndarray, np.ndarray]:
    """Training sequences [count, length + 1] and weights of the loss, a function of ``seed``.

    A row begins with a whole conversation, and others follow until it is full.
    """
    random = Random(seed)
    ids = np.zeros((count, stage.length + 1), np.int64)
    weights = np.zeros((count, stage.length + 1), np.float32)
    for row in range(count):
        filled = 0
        while filled <= stage.length:
            tokens, losses = encoder.document(draw_conversation(random, stage))
            take = min(len(tokens), stage.length + 1 - filled)
            ids[row, filled : filled + take] = tokens[:take]
            weights[row, filled : filled + take] = losses[:take]
            filled += take
    return ids, weights
