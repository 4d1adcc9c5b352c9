"""One question of the gate, and what counts as its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.eval import kinds

Message = dict[str, Any]
Call = tuple[str, Any]
"""A tool call: the function's name and its arguments, or their text where that is no JSON."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a model answered; ``error`` where there was no answer."""

    content: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def shown(self) -> str:
        """The answer as one line of text."""
        if self.error is not None:
            return f"error: {self.error}"
        calls = [f"{name}({json.dumps(arguments, ensure_ascii=False)})" for name, arguments in self.calls]
        return " ".join([*([self.content.strip()] if self.content.strip() else []), *calls])


@dataclass(frozen=True, slots=True)
class Question:
    """Args:
    id: names it among all questions.
    kind: the row of the table in which it counts.
    messages, tools: what is sent.
    wanted: the answer that is expected, as one line of text.
    right: whether an answer, where there was one, is that.
    """

    id: str
    kind: str
    messages: Sequence[Message]
    wanted: str
    right: Callable[[Said], bool]
    tools: Sequence[Message] = field(default=())


def call_of(name: str, arguments: str | dict[str, Any]) -> Call:
    """A call as it is compared: JSON by its value, whatever its spaces and order."""
    if isinstance(arguments, str):
        try:
            return name, json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return name, arguments
    return name, arguments


def held_out(kind: str, count: int, seed: int = 0) -> list[Question]:
    """Questions of one of plait-tiny's kinds, judged word for word; reasoning may say what it likes.

    Raises:
        ValueError: there is no such kind.
    """
    made = []
    for index, chat in enumerate(kinds.questions(kind, count, seed)):
        calls = tuple(
            call_of(call["function"]["name"], call["function"]["arguments"])
            for call in chat.answer.get("tool_calls", ())
        )
        wanted = Said(chat.answer["content"], calls)
        made.append(
            Question(f"{kind}/{seed}/{index}", kind, chat.prompt, wanted.shown, _exactly(wanted), chat.tools)
        )
    return made


def _exactly(wanted: Said) -> Callable[[Said], bool]:
    def right(said: Said) -> bool:
        return said.content.strip() == wanted.content.strip() and said.calls == wanted.calls

    return right
