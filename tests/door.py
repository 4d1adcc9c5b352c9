"""The whole server in front of a scripted engine, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from scripted import HELLO, ScriptedEngine

from plait.server import ServerSettings, create_app
from plait.server.front import front
from plait.server.gate import PROBES, Gate

ASKED = {"model": "tiny", "messages": HELLO}


class Door:
    """A gate with everything around it, and a client before it."""

    def __init__(self, settings: ServerSettings, engine: ScriptedEngine) -> None:
        self.settings, self.engine = settings, engine
        self.gate = Gate(settings.root_path)
        transport = httpx.ASGITransport(app=front(self.gate, settings), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://plait")

    def open(self) -> None:
        self.app = create_app(self.engine, self.settings)  # type: ignore[arg-type]
        self.gate.open(self.app)

    async def ask(self, more: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=ASKED | (more or {}), headers=headers)

    async def statuses(self) -> dict[str, int]:
        return {path: (await self.client.get(path)).status_code for path in sorted(PROBES)}


def at(
    use: Callable[[Door], Awaitable[Any]],
    settings: ServerSettings | None = None,
    engine: Callable[[], ScriptedEngine] = ScriptedEngine,
) -> Any:
    async def run() -> Any:
        door = Door(settings or ServerSettings(), engine())
        async with door.client:
            return await asyncio.wait_for(use(door), 20)

    return asyncio.run(run())
