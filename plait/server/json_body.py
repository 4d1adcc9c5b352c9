"""Bodies of requests as JSON, read strictly: what two readers could take for two things is no JSON here."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

_DEEPEST = 500
"""objects and lists within each other"""
_DEEP = f"it nests more than {_DEEPEST} levels deep"
_LARGE = 2**18
"""bytes from which a body is read beside the event loop: below, a thread costs more"""


class BadJSON(ValueError):
    """The body is no JSON; the message names the fault and, where there is one, its place."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadJSON(f"the name {_short(twice)} stands twice in one object")
    return made


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise BadJSON(f"the number {_short(text)} is too large")
    return number


def _constant(text: str) -> Any:
    raise BadJSON(f"{text} is no number in JSON")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def read(body: bytes) -> Any:
    """The value of a body.

    Raises:
        BadJSON: it is not UTF-8, not JSON, nests too deeply, names a field twice, or has a number that no
            computer holds.
    """
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as fault:
        raise BadJSON(f"it is not UTF-8: byte {fault.start} is 0x{body[fault.start]:02x}") from None
    except json.JSONDecodeError as fault:
        raise BadJSON(f"{fault.msg.removesuffix(' at')} at character {fault.pos}") from None
    except RecursionError:
        raise BadJSON(_DEEP) from None
    except BadJSON:
        raise
    except ValueError:  # of int(): more digits than Python converts
        longest = max(map(len, re.findall(r"\d+", body.decode())))
        raise BadJSON(f"a number of {longest} digits is too large") from None
    if body.count(b"[") + body.count(b"{") > _DEEPEST:
        _refuse_deep([value])
    return value


def _refuse_deep(value: Any) -> None:
    """Readers differ in how deep they go; this bound holds for all that are given what was read."""
    level, depth = [value], 0
    while level:
        if depth > _DEEPEST:
            raise BadJSON(_DEEP)
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
        depth += 1


class JSONRequest(Request):
    """A request whose body is read by ``read``."""

    async def json(self) -> Any:
        """The body. Raises HTTPException 400 where it is no JSON."""
        body = await self.body()
        try:
            return read(body) if len(body) < _LARGE else await asyncio.to_thread(read, body)
        except BadJSON as fault:
            raise HTTPException(400, f"the body is not valid JSON: {fault}") from None


class JSONRoute(APIRoute):
    """A route whose requests are ``JSONRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JSONRequest(request.scope, request.receive))

        return handle
