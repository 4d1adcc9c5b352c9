"""Connections with limits: uvicorn's HTTP protocol, for clients that are slow, many, or speak no HTTP.

A connection waits for its client in one of these ways, and for each there is a time after which it ends:

* for the head of a request (408): ``client_timeout`` seconds from its first byte, and on a new connection
  from the beginning; between requests uvicorn's keep-alive time holds;
* for a body (408): as long, and a second more for every ``SLOWEST_BODY`` bytes that came;
* for room to write in: as long without the buffer having emptied. The connection is cut, and with it the
  request.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plait.server.errors import APIError

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 64 * 2**10
"""of a request line and its headers"""
SLOWEST_BODY = 4096
"""bytes a second that a body must come with once its first ``client_timeout`` seconds are over"""
SEND_BUFFER = 2**18
"""bytes that the system holds for a client to read (Linux takes this twice)"""
_OTHER_FILES = 128
"""that a server has open beside its connections, with room"""
_LINGER = 2.0
"""seconds in which what a refused client still sends is dropped"""
_CHECK = 1.0
"""seconds between two looks at a body that is late"""


@dataclass(slots=True)
class Limits:
    """What a server lets its clients do; one for all its connections.

    Args:
        client_timeout: seconds, see above.
        most: connections at once. One more takes the place of the one that has been idle for longest; where
            none is idle it gets a 503.
    """

    client_timeout: float
    most: int
    idle: dict[Connection, None] = field(default_factory=dict)
    """those without a request, the longest idle first"""


def openable(most: int) -> int:
    """How many connections, up to ``most``, the process may have; raises its limit of open files for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        most = max(1, soft - _OTHER_FILES)
    return most


def protocol(limits: Limits) -> type[Connection]:
    """The class that uvicorn makes a connection of."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


class Connection(HttpToolsProtocol):
    """One connection."""

    limits: Limits

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._reading: TimerHandle | None = None
        self._writing: TimerHandle | None = None
        self._ended = False
        self._heads = 0
        self._head_bytes = 0
        self._in_head = True
        self._body_bytes = 0
        self._body_since = 0.0

    # -- from the transport -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if (
            sock is not None
        ):  # the system's own bound is megabytes, which a client that does not read would hold
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        limits = self.limits
        if len(self.connections) > limits.most:
            longest = next(iter(limits.idle), None)
            if longest is None:
                message = f"the server has {limits.most} connections, as many as it takes (--max-connections)"
                self._end(APIError(503, message, code="too_many_connections", retry_after=1))
                return
            longest.transport.close()
            limits.idle.pop(longest)
        limits.idle[self] = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.idle.pop(self, None)
        self._reading = _off(self._reading)
        self._writing = _off(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended or self.transport.is_closing():
            return
        in_head, heads = self._in_head, self._heads
        if in_head and self._reading is None:
            self._await_head()
        super().data_received(data)
        if in_head and self._in_head and self._heads == heads:  # all of it was head, and more is to come
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._writing = _off(self._writing)
        super().resume_writing()

    # -- from the parser --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.limits.idle.pop(self, None)
        self._in_head = True
        if self._reading is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MOST_HEAD_BYTES:
            self._refuse_head()
            return
        super().on_headers_complete()
        self._heads += 1
        self._in_head, self._head_bytes = False, 0
        self._body_bytes, self._body_since = 0, self.loop.time()
        _off(self._reading)
        self._reading = self.loop.call_later(self.limits.client_timeout, self._late_body)

    def on_body(self, body: bytes) -> None:
        if self._ended:
            return
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ended:
            return
        self._reading = _off(self._reading)
        self._in_head = True
        super().on_message_complete()

    # -- from the request that was answered -------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._await_reader()
        if not (self.pipeline or self.transport.is_closing()):
            self.limits.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """To a client that speaks no HTTP. ``msg`` is uvicorn's, and does not say more."""
        message = (
            "this is no valid HTTP/1.1 request: its line, its headers or the pieces of its body are malformed"
        )
        self._end(APIError(400, message, code="invalid_http"))

    # -- time is up -------------------------------------------------------------------------

    def _await_head(self) -> None:
        _off(self._reading)
        self._reading = self.loop.call_later(self.limits.client_timeout, self._late_head)

    def _refuse_head(self) -> None:
        message = f"the request's line and headers have more than {MOST_HEAD_BYTES} bytes"
        self._end(APIError(431, message, code="headers_too_large"))

    def _late_head(self) -> None:
        seconds = self.limits.client_timeout
        message = f"the request's headers did not come within {seconds:g} seconds (--client-timeout)"
        self._end(APIError(408, message, code="client_timeout"), speak=self._head_bytes > 0)

    def _late_body(self) -> None:
        allowed = self.limits.client_timeout + self._body_bytes / SLOWEST_BODY
        over = self.loop.time() - self._body_since - allowed
        if over < 0 or self.flow.read_paused:  # what is paused is not the client's fault
            self._reading = self.loop.call_later(max(_CHECK, -over), self._late_body)
            return
        message = (
            f"the body did not come within {self.limits.client_timeout:g} seconds (--client-timeout), "
            f"and a second more for every {SLOWEST_BODY} bytes"
        )
        self._end(APIError(408, message, code="client_timeout"))

    def _await_reader(self) -> None:
        _off(self._writing)
        self._writing = self.loop.call_later(self.limits.client_timeout, self._late_reader)

    def _late_reader(self) -> None:
        if self.transport.get_write_buffer_size():
            log.debug("a client did not read for %g seconds", self.limits.client_timeout)
            sock = self.transport.get_extra_info("socket")
            if sock is not None:  # or else the system goes on holding what was not read
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def _end(self, error: APIError, speak: bool = True) -> None:
        """Close the connection, with an answer where none was begun; a request that is under way learns that
        its client is gone."""
        if self._ended or self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            speak = speak and not cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        self.limits.idle.pop(self, None)
        self._reading = _off(self._reading)
        if not (speak and self.transport.can_write_eof()):
            self.transport.close()
            return
        # Closed at once, with bytes of the client unread, it would be reset, and the answer lost.
        self._ended = True
        self.transport.write(error.raw())
        self.transport.write_eof()
        self._reading = self.loop.call_later(_LINGER, self.transport.abort)


def _off(timer: TimerHandle | None) -> TimerHandle | None:
    """Stop a timer; there is none then."""
    if timer is not None:
        timer.cancel()
    return None
