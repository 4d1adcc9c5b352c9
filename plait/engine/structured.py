"""Requests that wait for their grammar to be compiled, and the grammars of those that run."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from plait.core.request import Request
from plait.text.grammar import Grammars
from plait.worker.structure import Matcher


class GrammarQueue:
    """Holds back requests until the scheduler can have them. Nobody else waits for that.

    Args:
        grammars: compiles.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[Request, Future[Any]]] = {}
        self._held: dict[str, tuple[str, Matcher]] = {}
        """request id -> grammar and its matcher, while the request lives: a preempted one needs it again"""

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: Request) -> None:
        """Queue a request that has a structure."""
        assert request.params.structure is not None
        self._waiting[request.id] = request, self._grammars.submit(request.params.structure.grammar)

    def take(self) -> tuple[list[Request], dict[str, str]]:
        """Requests whose grammar is there by now, and why others cannot be served, by id."""
        ready: list[Request] = []
        refused: dict[str, str] = {}
        for request, compiled in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[request.id]
            assert request.params.structure is not None
            try:
                self._held[request.id] = request.params.structure.grammar, compiled.result()
            except Exception as fault:  # a tokenizer that cannot be read, too: the engine goes on without it
                refused[request.id] = f"the structure cannot be served: {fault}"
            else:
                ready.append(request)
        return ready, refused

    def wait(self, seconds: float) -> None:
        """Sleep until a grammar is there, or so long."""
        wait([compiled for _, compiled in self._waiting.values()], seconds, FIRST_COMPLETED)

    def matcher_of(self, grammar: str) -> Matcher:
        """The matcher of a grammar that a request here has; copy it."""
        return next(matcher for held, matcher in self._held.values() if held == grammar)

    def outgrown(self, request_id: str) -> None:
        """The request's grammar went beyond its limits, which all that share it feel from then on."""
        if (held := self._held.get(request_id)) is not None:
            self._grammars.forget(held[0])

    def forget(self, request_id: str) -> bool:
        """The request has ended. Whether it waited here."""
        self._held.pop(request_id, None)
        return self._waiting.pop(request_id, None) is not None

    def close(self) -> None:
        self._grammars.close()
