"""Starts `plait serve` as a user does, and watches what it leaves behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

MODEL = "smollm2-135m"
_READY = re.compile(r"at (http://\S+)/v1, engine process (\d+)")


class LiveServer:
    """A `plait serve` process on a free port of this machine."""

    def __init__(self, *flags: str, model: str = MODEL):
        command = [sys.executable, "-m", "plait", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self.engine_pid = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(120) or not self.url:
            self.process.kill()
            raise RuntimeError("plait serve did not start:\n" + "\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := _READY.search(line):
                self.url, self.engine_pid = found[1], int(found[2])
                self._ready.set()
        self._ready.set()

    def metric(self, name: str) -> float:
        """The value of one metric; ``name`` may end in labels, without the model's."""
        name, _, labels = name.partition("{")
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(name + "{") and labels.rstrip("}") in line:
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for ``condition``; whether it came in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
