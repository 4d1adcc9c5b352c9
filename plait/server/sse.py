"""Server-sent events, and clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def event(data: bytes) -> bytes:
    """One server-sent event; ``data`` is JSON on one line."""
    return b"data: " + data + b"\n\n"


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _stop(task, watch)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. One that fails, or a cancellation, cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _stop(*tasks)


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams as they come, each with the index of its stream.

    The first stream that fails ends all. Closing the merged stream closes every one of them.
    """
    if len(streams) == 1:  # the usual case, without a queue between
        async with aclosing(cast("AsyncGenerator[T, None]", streams[0])) as stream:
            async for only in stream:
                yield 0, only
        return
    # Bounded, so that a reader who stops stops the streams, too.
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, source: AsyncIterator[T]) -> None:
        failure = None
        try:
            async with aclosing(cast("AsyncGenerator[T, None]", source)) as stream:
                async for item in stream:
                    await queue.put((index, item, None))
        except Exception as error:
            failure = error
        await queue.put((index, None, failure))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    open_streams = len(streams)
    try:
        while open_streams:
            index, item, failure = await queue.get()
            if failure is not None:
                raise failure
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        await _stop(*tasks)


class EventStream(Response):
    """Sends events as they come; closes them and their ``source`` when the client hangs up.

    Starlette's StreamingResponse learns of a hang-up only from a failed send. A request that waits
    for its next token sends nothing, so this one watches the connection as well.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None]):
        self.status_code = 200
        self.background = None
        self._events = events
        self._source = source
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()
            # Closing a generator that never ran does not run its own clean-up.
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def gone() -> Response:
    """What is "answered" to a client that is no longer there (499, as nginx logs it)."""
    return Response(status_code=499)
