"""What a parser finds in an answer, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the user is told."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call; ``index`` counts from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: all of them joined are one JSON object once the call has ended."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole. One that was cut off, or that is malformed, has no end: its arguments stay open, so
    that no half of a call can be taken for a whole one."""

    index: int


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd
