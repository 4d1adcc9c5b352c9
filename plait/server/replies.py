"""One answer of a conversation, with reasoning, content and calls apart, whatever API it goes out by."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.engine.outputs import CompletionDelta, CompletionOutput
from plait.text.parsing import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
)


@dataclass(slots=True)
class Call:
    """A tool call; ``arguments`` is JSON, whole once ``ended``."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def json(self) -> str:
        return "".join(self.arguments)


class Reply:
    """Takes what the engine adds to one answer, and gathers it.

    Args:
        parser: of this answer; None: all of its text is content.
        id_length: letters and digits of a call's id; 0: a long one.
    """

    def __init__(self, parser: OutputParser | None, id_length: int = 0) -> None:
        self._parser = parser
        self._id_length = id_length
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[Call] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @classmethod
    def of(cls, output: CompletionOutput, parser: OutputParser | None, id_length: int = 0) -> Reply:
        """A whole answer."""
        reply = cls(parser, id_length)
        reply._take(output.text, output.token_ids, output.starts, output.finish_reason, output.stop_reason)
        return reply

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) or None

    @property
    def content(self) -> str | None:
        """None where there is nothing but reasoning or calls."""
        text = "".join(self._content)
        return None if not text and (self.calls or self._reasoning) else text

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens if self._parser else 0

    def take(self, delta: CompletionDelta) -> list[Event]:
        """What a delta adds."""
        return self._take(delta.text, delta.token_ids, delta.starts, delta.finish_reason, delta.stop_reason)

    def _take(
        self,
        text: str,
        tokens: Sequence[int],
        starts: Sequence[int],
        reason: str | None,
        stop: int | str | None,
    ) -> list[Event]:
        if self._parser is None:
            events: list[Event] = [Content(text)] if text else []
        else:
            events = self._parser.feed(text, tokens, starts)
            if reason is not None:
                # A stop string cuts an answer; it is not the model's end of it.
                events += self._parser.finish("cut" if isinstance(stop, str) else reason)
        for event in events:
            self._gather(event)
        if reason is not None:
            called = reason == "stop" and any(call.ended for call in self.calls)
            self.finish_reason, self.stop_reason = "tool_calls" if called else reason, stop
        return events

    def _gather(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                self._reasoning.append(text)
            case Content(text):
                self._content.append(text)
            case CallBegin(_, name):
                self.calls.append(Call(self._new_id(), name))
            case CallArguments(index, text):
                self.calls[index].arguments.append(text)
            case CallEnd(index):
                self.calls[index].ended = True

    def _new_id(self) -> str:
        if self._id_length:
            alphabet = string.ascii_letters + string.digits
            return "".join(secrets.choice(alphabet) for _ in range(self._id_length))
        return f"call_{uuid.uuid4().hex[:24]}"
