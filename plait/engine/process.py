"""The engine's own process: ``python -m plait.engine.process``.

Its settings come as one line of JSON on standard input, which then stays open as a lifeline: when it
closes, the parent is gone and the process ends. Everything else goes over a ZeroMQ socket.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from plait.config import ConfigError, EngineArgs
from plait.core.limits import Refused
from plait.engine import messages as m
from plait.logs import LogSettings, configure

if TYPE_CHECKING:
    from plait.engine.core import EngineCore, StepOutcome

log = logging.getLogger("plait.engine.process")

IDLE_SECONDS = 1.0
"""Longest sleep without work."""
SWITCH_SECONDS = 2e-5
"""Longest that planning keeps Python's lock from a step that comes back from a kernel."""


class StartOrder(msgspec.Struct):
    """The line on standard input."""

    address: str
    args: EngineArgs
    beside: list[int] = []
    """ids of processes whose memory ``memory_limit`` bounds too"""
    logs: LogSettings = LogSettings(process="engine")


def _reason(fault: Exception) -> str:
    """What the client is told. A traceback is logged where the fault may be plait's own."""
    if isinstance(fault, ConfigError | ValueError | OSError | MemoryError) and str(fault):
        return str(fault)
    log.error("the engine could not start", exc_info=fault)
    return f"the engine could not start: {type(fault).__name__}: {fault}"


class EngineProcess:
    """Serves clients over one ROUTER socket and steps the engine in between."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.core: EngineCore | None = None
        self.owner_of: dict[str, bytes] = {}
        """request id -> the client that sent it"""
        self.gone: set[bytes] = set()
        """clients that have died: what they sent may still be on its way"""
        self.running = True

    # -- start ------------------------------------------------------------------------------

    def start(self, args: EngineArgs, beside: Sequence[int] = ()) -> bool:
        """Load the model, telling the first client how it goes. False if it cannot be served."""
        # The imports cost seconds: the client is told before they begin.
        client = self.socket.recv_multipart()[0]

        def stage(text: str) -> None:
            self.send(client, m.Stage(text))

        stage("importing torch")
        from plait.engine.load import load_engine

        try:
            self.core = load_engine(args, stage, beside)
        except Exception as fault:
            self.send(client, m.StartFailed(_reason(fault)))
            return False
        resolved = self.core.resolved
        if resolved.async_scheduling:
            sys.setswitchinterval(SWITCH_SECONDS)
        self.send(
            client,
            m.Ready(
                max_model_len=resolved.max_model_len,
                vocab_size=resolved.config.vocab_size,
                decisions=[str(decision) for decision in resolved.decisions],
                pid=os.getpid(),
                end_token_ids=list(resolved.generation.eos_token_ids),
            ),
        )
        return True

    # -- loop -------------------------------------------------------------------------------

    def serve(self) -> None:
        assert self.core is not None
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        if self.core.wake_descriptor is not None:
            poller.register(self.core.wake_descriptor, zmq.POLLIN)
        idle = True
        while self.running:
            if idle:
                poller.poll(math.ceil(1000 * self.core.patience(IDLE_SECONDS)))
            self.receive()
            if self.running:
                outcome = self.core.step()
                self.deliver(outcome)
                idle = outcome.idle

    def receive(self) -> None:
        """Handle all messages that are there."""
        while self.running and self.socket.poll(0):
            client, body = self.socket.recv_multipart()
            if body:
                self.handle(client, m.decode_from_client(body))

    def handle(self, client: bytes, message: m.FromClient) -> None:
        core = self.core
        assert core is not None
        match message:
            case m.Add():
                self.add(client, message)
            case m.Cancel(request_ids):
                for request_id in request_ids:
                    core.cancel(request_id)
                    self.owner_of.pop(request_id, None)
            case m.AskStats(number):
                self.send(client, m.Stats(number, core.stats()))
            case m.AskTree(number, most):
                self.send(client, m.Tree(number, core.prefix_tree(most)))
            case m.ResetPrefixCache():
                core.reset_prefix_cache()
            case m.ClientGone(name):
                self.forget(name.encode())
            case m.Stop():
                self.running = False

    def forget(self, client: bytes) -> None:
        """End all requests of a client that has died."""
        assert self.core is not None
        self.gone.add(client)
        for request_id in [r for r, owner in self.owner_of.items() if owner == client]:
            self.core.cancel(request_id)
            del self.owner_of[request_id]

    def add(self, client: bytes, message: m.Add) -> None:
        core = self.core
        assert core is not None
        if client in self.gone:
            return
        try:
            core.add(
                message.request_id,
                message.tokens,
                m.params_from_wire(message.params),
                seed=message.seed,
                max_tokens=message.max_tokens,
                priority=message.priority,
                cache_salt=message.cache_salt,
                tail=message.tail,
                boundaries=message.boundaries,
                kv_transfer_params=message.kv_transfer_params,
            )
        except (Refused, ValueError) as fault:
            self.send(client, m.RequestFailed(message.request_id, str(fault), refused=True))
        else:
            self.owner_of[message.request_id] = client

    def deliver(self, outcome: StepOutcome) -> None:
        """Send each client what the step did for its requests."""
        assert self.core is not None
        entries: defaultdict[bytes, list[m.Output]] = defaultdict(list)
        for p in outcome.progress:
            over = p.finish_reason is not None
            owner = self.owner_of.pop(p.request_id) if over else self.owner_of[p.request_id]
            entries[owner].append(
                m.Output(
                    p.request_id, p.tokens, p.logprobs, p.prompt_logprobs,
                    p.finish_reason, p.stop_reason, p.num_cached_tokens, self.core.reply(p),
                    self.core.queue_clock.take(p.request_id),
                )
            )  # fmt: skip
        for client, outputs in entries.items():
            self.send(client, m.Outputs(outputs))
        for ended, refused in ((outcome.failed, False), (outcome.refused, True)):
            for request_id, reason in ended.items():
                self.core.queue_clock.forget(request_id)
                self.send(self.owner_of.pop(request_id), m.RequestFailed(request_id, reason, refused))

    def send(self, client: bytes, message: m.Message) -> None:
        self.socket.send_multipart((client, m.encode(message)))

    def crash(self, reason: str) -> None:
        """Tell every client that waits."""
        for client in set(self.owner_of.values()):
            self.send(client, m.Crashed(reason))


GRACE_SECONDS = 3.0
"""How long the loop may take to end by itself once the lifeline is cut."""


def watch_lifeline(process: EngineProcess, folder: Path) -> None:
    """End the process when standard input closes: the parent is gone, or wants it to end."""
    while os.read(0, 4096):
        pass
    process.running = False
    if process.core is not None:
        time.sleep(GRACE_SECONDS)  # the longest that a step in progress is given; then it ends here
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> int:
    line = b""
    while not line.endswith(b"\n"):  # unbuffered, so that the lifeline's thread owns what follows
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    order = msgspec.json.decode(line, type=StartOrder)
    configure(order.logs)
    folder = Path(order.address.removeprefix("ipc://")).parent
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)  # a ROUTER drops what exceeds its mark; what waits is bounded by the requests' lengths
    socket.setsockopt(zmq.LINGER, 500)
    socket.bind(order.address)
    process = EngineProcess(socket)
    threading.Thread(target=watch_lifeline, args=(process, folder), name="lifeline", daemon=True).start()
    try:
        if not process.start(order.args, order.beside):
            return 2
        process.serve()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as fault:
        log.critical("the engine process crashed", exc_info=fault)
        process.crash(f"{type(fault).__name__}: {fault}")
        return 1
    finally:
        if process.core is not None:
            process.core.close()
        context.destroy(linger=500)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
