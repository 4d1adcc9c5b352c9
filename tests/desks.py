"""SDKs of others, each with a scripted engine behind it that says what a model would."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from answering import CALL
from scripted import ScriptedEngine
from sockets import listening
from thinking import TEMPLATE

from plait.server import ServerSettings

THOUGHT = "I should look.\n</think>\n\n"
ARGUMENTS = {"city": "São Paulo", "days": 3}


class Desk:
    """Starts engines that say what they are told, and knows what the last one was asked."""

    def __init__(self, stack: ExitStack):
        self.stack = stack
        self.engine: ScriptedEngine

    def address(self, answer: str, reason: str = "stop", **settings: Any) -> str:
        """Of a server whose model answers so."""
        self.engine = ScriptedEngine(answer, None, TEMPLATE, 10_000, reason)
        return self.stack.enter_context(listening(self.engine, ServerSettings(**settings)))

    @property
    def prompt(self) -> str:
        return bytes(self.engine.asked[-1][0]["prompt_token_ids"]).decode()


__all__ = ["ARGUMENTS", "CALL", "THOUGHT", "Desk"]
