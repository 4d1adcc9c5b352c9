"""Between the APIs and the engine: how many wait, how long requests take, how often streams speak."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plait.core.sampling_params import SamplingParams
from plait.engine.gathering import gather
from plait.engine.outputs import CompletionDelta, RequestOutput
from plait.server.board import Board
from plait.server.course import Course
from plait.server.errors import APIError
from plait.server.prompts import Prompt

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine

DEADLINE = "deadline"
"""``stop_reason`` of an answer that its deadline cut off."""
_LONGEST_RETRY = 60
_MOST_UNREAD = 1024
"""tokens of an answer that may wait for a client that does not read, beside the buffers of its connection"""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of the engine.

    ``timeout``: seconds from now after which the answer ends. ``transfer``: which part of it another engine
    has done, or does.
    """

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None
    transfer: dict[str, Any] | None = None


class Desk:
    """Takes orders to the engine.

    Args:
        max_waiting: most requests that wait for their first token; one more is refused. None: no bound.
        stream_interval: tokens between two events of a stream, after the first.
        on_order: told each order that is taken.
        on_end: told how each of them went.
        board: where this process and others that serve the engine say how many wait.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        max_waiting: int | None = None,
        stream_interval: int = 1,
        on_order: Callable[[Order], None] | None = None,
        on_end: Sequence[Callable[[Order, Course], None]] = (),
        board: Board | None = None,
    ) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._interval = stream_interval
        self._on_order = on_order
        self._on_end = on_end
        self._first_token = 1.0
        """seconds to the first token, averaged over the last requests"""
        self._board = board or Board()
        self.waiting = 0
        """requests that wait for their first token, of this process"""

    def stream(self, order: Order) -> AsyncGenerator[CompletionDelta, None]:
        """The answers, as often as streams speak.

        Raises:
            APIError: too many wait, or the deadline came before the first token.
        """
        deltas = self._deltas(order)
        return deltas if self._interval == 1 else _spaced(deltas, self._interval)

    async def generate(self, order: Order) -> RequestOutput:
        """The whole answers. Raises as ``stream``."""
        return await gather(
            self._deltas(order),
            request_id=order.request_id,
            prompt=order.prompt.text,
            prompt_token_ids=order.prompt.token_ids,
            answers=order.params.n,
        )

    async def _deltas(self, order: Order) -> AsyncGenerator[CompletionDelta, None]:
        self._refuse_if_full()
        if self._on_order is not None:
            self._on_order(order)
        course = Course()
        self._wait(1)
        waits, late = True, False

        def end() -> None:
            nonlocal late
            late = True
            self._engine.abort(order.request_id)

        timer = None
        if order.timeout is not None:
            timer = asyncio.get_running_loop().call_later(order.timeout, end)
        source = self._engine.stream(
            {"prompt_token_ids": order.prompt.token_ids, "boundaries": order.prompt.boundaries},
            order.params,
            request_id=order.request_id,
            priority=order.priority,
            cache_salt=order.cache_salt,
            kv_transfer_params=order.transfer,
            shown_ids=order.prompt.shown_ids,
            most_unread=_MOST_UNREAD,
        )
        try:
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    course.take(delta)
                    if late and delta.finish_reason == "abort":
                        if waits:
                            message = f"timeout={order.timeout}: no token came in time"
                            raise APIError(504, message, "timeout", "deadline_exceeded")
                        delta = replace(delta, finish_reason="length", stop_reason=DEADLINE)
                    if waits and delta.token_ids:
                        waits = False
                        self._wait(-1)
                        self._first_token += 0.2 * ((course.first or 0.0) - self._first_token)
                    yield delta
        except Exception as fault:
            course.fault = fault
            raise
        finally:
            if waits:
                self._wait(-1)
            if timer is not None:
                timer.cancel()
            course.end()
            for tell in self._on_end:
                tell(order, course)

    def _wait(self, more: int) -> None:
        self.waiting += more
        self._board.set(self.waiting)

    def _refuse_if_full(self) -> None:
        if self._max_waiting is None or (waiting := self._board.total()) < self._max_waiting:
            return
        seconds = min(max(1, math.ceil(self._first_token)), _LONGEST_RETRY)
        message = (
            f"{waiting} requests wait for their first token, as many as this server lets wait "
            f"(--max-waiting); try again in {seconds} s"
        )
        raise APIError(429, message, code="too_many_waiting", retry_after=seconds)


async def _spaced(
    source: AsyncGenerator[CompletionDelta, None], interval: int
) -> AsyncGenerator[CompletionDelta, None]:
    """The first delta of each answer at once, then one for every ``interval`` tokens."""
    held: dict[int, CompletionDelta] = {}
    begun: set[int] = set()
    async with aclosing(source) as deltas:
        async for delta in deltas:
            index = delta.index
            whole = _merged(held.pop(index), delta) if index in held else delta
            if index not in begun or whole.finish_reason or len(whole.token_ids) >= interval:
                if whole.token_ids:
                    begun.add(index)
                yield whole
            else:
                held[index] = whole


def _merged(a: CompletionDelta, b: CompletionDelta) -> CompletionDelta:
    logprobs = (
        None if a.logprobs is None and b.logprobs is None else [*(a.logprobs or []), *(b.logprobs or [])]
    )
    return CompletionDelta(
        index=a.index,
        text=a.text + b.text,
        token_ids=a.token_ids + b.token_ids,
        logprobs=logprobs,
        finish_reason=b.finish_reason,
        stop_reason=b.stop_reason,
        num_cached_tokens=max(a.num_cached_tokens, b.num_cached_tokens),
        prompt_logprobs=a.prompt_logprobs or b.prompt_logprobs,
        starts=a.starts + b.starts,
        kv_transfer_params=b.kv_transfer_params or a.kv_transfer_params,
    )


__all__ = ["DEADLINE", "Desk", "Order"]
