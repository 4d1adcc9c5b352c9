"""Slow work beside the event loop that the end of the program does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def beside(work: Callable[..., T], *args: Any) -> T:
    """The result of ``work(*args)``, from a thread of its own.

    Threads of ``asyncio.to_thread`` keep the program from ending until they are done; this one, which may
    wait for a network, does not. A cancelled caller leaves it to itself.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, fault: BaseException | None) -> None:
        if done.cancelled():
            return
        if fault is not None:
            done.set_exception(fault)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, fault = None, None
        try:
            result = work(*args)
        except BaseException as error:
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, fault)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return await done
