"""A conversation whose last message is the answer that is expected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_UNIT = re.compile(r"[^\W\d]+|\d|[^\w\s]+|\n")


def size(text: str) -> int:
    """About how many tokens of plait-tiny a text takes: words, digits, marks and line ends."""
    return len(_UNIT.findall(text))


TURN_SIZE = 10
"""Tokens that one question and its answer take beside their own text."""


@dataclass(slots=True)
class Conversation:
    """Messages in OpenAI's form, the last one the assistant's.

    ``recited`` holds indices of assistant messages that are context alone: what stands there is not what the
    model would say in that place (a sum whose reasoning was left out), and is not learnt.
    """

    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Message] = ()
    recited: set[int] = field(default_factory=set)

    def user(self, text: str) -> Conversation:
        self.messages.append({"role": "user", "content": text})
        return self

    def assistant(self, text: str, reasoning: str | None = None) -> Conversation:
        message = {"role": "assistant", "content": text}
        self.messages.append(message | ({"reasoning_content": reasoning} if reasoning else {}))
        return self

    def calls(self, name: str, arguments: dict[str, Any]) -> Conversation:
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{len(self.messages)}", "type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return self

    def result(self, text: str) -> Conversation:
        """The answer of the tool that was called last."""
        identifier = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": identifier, "content": text})
        return self

    @property
    def prompt(self) -> list[Message]:
        return self.messages[:-1]

    @property
    def answer(self) -> Message:
        return self.messages[-1]
