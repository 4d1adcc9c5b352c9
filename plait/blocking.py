"""An engine for callers that do not run an event loop: it gets a loop of its own in a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from plait.config import EngineArgs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from plait.engine.async_engine import AsyncEngine

T = TypeVar("T")

_CLEANUP_SECONDS = 10.0
"""how long an interrupted call waits until its requests are aborted"""


class BlockingEngine:
    """Starts an engine, and runs coroutines on its loop.

    The engine process ends with ``close``, when this object is collected, and at interpreter exit.

    Raises:
        ValueError: settings or a model that cannot work.
    """

    engine: AsyncEngine

    def __init__(self, args: EngineArgs, on_stage: Callable[[str], None] | None = None):
        from plait.engine.async_engine import AsyncEngine

        loop = asyncio.new_event_loop()
        # A daemon: at exit Python would join any other thread before it calls the finalizer.
        thread = threading.Thread(target=loop.run_forever, name="plait-engine-client", daemon=True)
        thread.start()
        self._loop = loop
        try:
            self.engine = self.call(AsyncEngine.start(args, on_stage=on_stage))
        except BaseException:
            _end_loop(loop, thread)
            raise
        self._close = weakref.finalize(self, _shut_down, self.engine, loop, thread)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Ctrl-C cancels it, and waits until it has cleaned up."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(_CLEANUP_SECONDS)
            raise

    def iterate(self, stream: AsyncIterator[T]) -> Iterator[T]:
        """The items of ``stream`` as they come. Leaving the iterator early closes the stream."""
        items: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        async def pump() -> None:
            failure = None
            try:
                async with aclosing(cast("AsyncGenerator[T, None]", stream)) as source:
                    async for item in source:
                        items.put((item, None))
            except Exception as error:
                failure = error
            items.put((None, failure))

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                item, failure = items.get()
                if failure is not None:
                    raise failure
                if item is None:
                    return
                yield item
        finally:
            future.cancel()

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def close(self) -> None:
        """End the engine process. Calling it again does nothing."""
        self._close()


def _shut_down(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    try:
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result(timeout=30)
    finally:
        _end_loop(loop, thread)


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=5)
    if not thread.is_alive():
        loop.close()
