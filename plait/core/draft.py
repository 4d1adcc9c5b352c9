"""The step that is being planned: who takes part with how many tokens, and what is left of the budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.core.pace import pairs
from plait.core.request import PendingExport, Request, Status


@dataclass(slots=True)
class Planned:
    """A request's part of a step that is being planned or is in flight."""

    request: Request
    epoch: int
    start: int
    count: int
    sample: bool
    exports: list[PendingExport] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_current(self) -> bool:
        """The request was not cancelled, preempted or ended since; else what the step gave is dropped."""
        request = self.request
        return request.epoch == self.epoch and request.status in (Status.RUNNING, Status.LEAVING)

    @property
    def is_awaited(self) -> bool:
        """The request was swapped out since, and what the step gave is its own all the same."""
        image = self.request.image
        return image is not None and image.epoch == self.epoch


@dataclass(slots=True)
class Draft:
    """The step being planned."""

    step: int
    budget: int
    parts: list[Planned] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    turn: set[Request] = field(default_factory=set)
    """level requests that step now; their tokens are promised from the start"""
    tokens: int = 0
    """planned or promised"""
    pairs: int = 0
    prompt_tokens: int = 0
    preempted: bool = False

    @property
    def left(self) -> int:
        """Tokens that prompts may still take."""
        return self.budget - self.tokens

    def promise(self, turn: set[Request]) -> None:
        self.turn |= turn
        self.tokens += len(turn)
        self.pairs += sum(request.length for request in turn)

    def withdraw(self, request: Request) -> None:
        """What was promised to it, if anything was, is free for others."""
        if request in self.turn:
            self.turn.discard(request)
            self.tokens -= 1
            self.pairs -= request.length

    def add(self, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        sample = start + count == request.length
        self.parts.append(Planned(request, request.epoch, start, count, sample))
        if request not in self.turn:
            self.tokens += count
            self.pairs += pairs(start, count)
            self.prompt_tokens += count
