"""The tables that a parser runs on: what text means in each state, and where tags lead."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """What the text of a state is."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    LEAD = enum.auto()
    """white space that belongs to what follows, if that is text"""
    GAP = enum.auto()
    """white space that means nothing"""
    DROP = enum.auto()
    """any text, which means nothing"""
    NAME = enum.auto()
    """a function's name"""
    KEY = enum.auto()
    """a parameter's name"""
    VALUE = enum.auto()
    """a parameter's value"""
    CALL = enum.auto()
    """a JSON object with a name and arguments"""
    ARGUMENTS = enum.auto()
    """a JSON object of arguments"""


class Act(enum.Enum):
    """What a tag does besides leading to a state."""

    OPEN = enum.auto()
    """what follows may be a call; all text from here on is kept until that is sure"""
    NAME = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    """the name, key or value is whole"""
    END = enum.auto()
    """the call is whole"""
    NEXT = enum.auto()
    """the call is whole, and another may follow: END and OPEN"""


@dataclass(frozen=True, slots=True)
class Move:
    """Where a tag leads. ``keep``: the tag is read again, as text of the new state."""

    to: str
    act: Act | None = None
    keep: bool = False


FAULT = "fault"
"""In place of a state: the text is no call after all. What was kept of it becomes content."""


@dataclass(frozen=True, slots=True)
class State:
    """One state.

    Args:
        kind: what text is here.
        tags: text to where it leads. No tag begins another.
        then: LEAD and GAP go there at any other text; CALL and ARGUMENTS when their JSON is complete.
        known: a name must be one of the request's tools, or it is a fault.
    """

    kind: Kind
    tags: Mapping[str, Move] = field(default_factory=dict)
    then: str = "content"
    known: bool = False


Table = Mapping[str, State]
"""Every table has the states "content" (plain text), "start" (of an answer), and "over" (after the last call
that the client takes)."""


def check(table: Table) -> None:
    """Raise ValueError if a state leads nowhere, or a tag begins another."""
    for name, state in table.items():
        for target in (state.then, *(move.to for move in state.tags.values())):
            if target != FAULT and target not in table:
                raise ValueError(f"state {name!r} leads to {target!r}, which does not exist")
        for a in state.tags:
            for b in state.tags:
                if not a or (a != b and b.startswith(a)):
                    raise ValueError(f"in state {name!r} the tag {a!r} begins {b!r}")
