"""Starts `plait serve` as a user does, over a small hybrid model, and watches what it leaves behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import tiny
from checkpoints import FAMILIES

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DUMMY = ("--load-format", "dummy", "--seed", "1")
"""Random weights, and a fixed series of seeds for requests that bring none."""
_READY = re.compile(r"at (https?://\S+)/v1, engine process (\d+)")


def small_model(folder: Path) -> Path:
    """A hybrid's config and a tokenizer of as many tokens as its vocabulary; the weights are made up."""
    backend = tiny.byte_level()
    tiny.save(backend, folder, chat_template=CHATML)
    kind, shape = FAMILIES["qwen3_5"]
    config = {"model_type": kind, "architectures": ["Qwen3_5ForCausalLM"], **shape}
    config |= {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 4096, "eos_token_id": 2}
    config |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class LiveServer:
    """A `plait serve` process on a free port of this machine, with random weights."""

    def __init__(self, model: Path, *flags: str):
        command = [sys.executable, "-m", "plait", "serve", str(model), "--port", "0", *DUMMY, *flags]
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
        for line in httpx.get(self.url + "/metrics", timeout=60).text.splitlines():
            if line.startswith(name + "{") and labels.rstrip("}") in line:
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def join(self) -> None:
        """Wait until ``lines`` has all that an ended server has written."""
        self._reader.join(10)

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
