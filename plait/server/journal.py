"""One line for each HTTP request, and the id by which its lines are found."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait import logs
from plait.engine.messages import params_to_wire
from plait.server.gate import PROBES

if TYPE_CHECKING:
    from plait.server.desk import Order

access = logging.getLogger("plait.access")
requests = logging.getLogger("plait.requests")

_SOUND_ID = re.compile(rb"[!-~]{1,128}")
"""what a client may call its request: it stands in log lines and in a header"""


class Journal:
    """Gives each request an id (the client's ``x-request-id``, if it brings a sound one), returns it with the
    answer, and writes a line when the answer is over.

    Args:
        writes: write the lines at all.
        omits: paths that get none. Those of probes get one at level "debug" only.
    """

    def __init__(self, app: ASGIApp, writes: bool = True, omits: Collection[str] = ()) -> None:
        self._app = app
        self._writes = writes
        self._omits = frozenset(omits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _id_of(scope)
        header = request_id.encode()
        logs.request_id.set(request_id)
        began = time.perf_counter()
        status, whole = 0, False

        async def watch(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                # SDKs of OpenAI look for the one name, those of Anthropic for the other.
                ids = [(b"x-request-id", header), (b"request-id", header)]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            elif not message.get("more_body"):
                whole = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if self._writes and scope["path"] not in self._omits:
                self._write(scope, status, whole, time.perf_counter() - began)

    @staticmethod
    def _write(scope: Scope, status: int, whole: bool, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
        if not access.isEnabledFor(level):
            return
        client = ":".join(map(str, scope.get("client") or ("-",)))
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "client": client,
            "whole": whole,
        }
        text = '%s "%s %s" %d in %.3f s%s'
        cut = "" if whole else ", cut off"
        access.log(
            level,
            text,
            client,
            scope["method"],
            scope["path"],
            status,
            seconds,
            cut,
            extra={"fields": fields},
        )


def _id_of(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex


class RequestLog:
    """Writes down what is asked of the engine: prompts, and parameters that are not the default.

    Args:
        longest: characters of a prompt's text, or its token ids, that are shown; None: all.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest

    def __call__(self, order: Order) -> None:
        prompt, params = order.prompt, params_to_wire(order.params)
        shown: Any = (prompt.token_ids if prompt.text is None else prompt.text)[: self._longest]
        fields = {
            "id": order.request_id,
            "prompt": shown,
            "prompt_tokens": len(prompt.token_ids),
            "params": params,
            "priority": order.priority,
        }
        text = "%s: %d prompt tokens, %s, prompt %r"
        requests.info(text, order.request_id, len(prompt.token_ids), params, shown, extra={"fields": fields})
