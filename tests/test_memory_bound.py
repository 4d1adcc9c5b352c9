"""The memory limit is a bound: of the whole process tree, at start and under a load that asks for more."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from live import LiveServer, small_model, until

from plait.bench.memory import process_tree, pss_bytes
from plait.engine.memory import parse_bytes

MOST = 1.05
"""Times the limit."""
SPARE = 128 * 2**20
"""Bytes that may be left for a step's temporaries and for growth."""


def hungry_model(folder: Path) -> Path:
    """Few weights and much memory: 15 KiB of pages a token, so that seconds fill a cache."""
    small_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_attention_heads": 48, "num_key_value_heads": 24}
    path.write_text(json.dumps(config))
    return folder


class Watch(threading.Thread):
    """Notes the most memory that a process tree held."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = 0
        self.samples = 0
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.05):
            self.look()

    def look(self) -> None:
        self.peak = max(self.peak, pss_bytes(process_tree(self.pid)))
        self.samples += 1

    def stop(self) -> None:
        self._end.set()
        self.join()
        self.look()


def load(server: LiveServer, requests: int, draw: random.Random) -> dict[str, int]:
    """Clients that ask for more than fits, some of which hang up. How their requests ended."""
    asks = [
        ([draw.randrange(3, 500) for _ in range(draw.randrange(200, 1500))], draw.random())
        for _ in range(requests)
    ]
    ends = {"answered": 0, "hung up": 0}

    def ask(prompt: list[int], fate: float) -> str:
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as response:
            assert response.status_code == 200
            for count, line in enumerate(response.iter_lines()):
                if fate < 0.3 and count > 40 * fate:
                    return "hung up"
                if line == "data: [DONE]":
                    return "answered"
        raise AssertionError("the stream ended without a word")

    with ThreadPoolExecutor(32) as pool:
        for end in pool.map(lambda one: ask(*one), asks):
            ends[end] += 1
    return ends


def idle(server: LiveServer) -> bool:
    waiting = server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
    return waiting == 0 and server.metric('plait:pages{state="used"}') == 0


@pytest.mark.parametrize(
    ("limit", "more"),
    [
        ("600MiB", []),
        pytest.param("1GiB", [], marks=pytest.mark.slow),
        pytest.param("2GiB", [], marks=pytest.mark.slow),
        pytest.param("1500MiB", ["--api-server-count", "2"], marks=pytest.mark.slow),
    ],
)
def test_memory_of_the_process_tree_stays_within_the_limit(
    tmp_path: Path, limit: str, more: list[str]
) -> None:
    flags = ["--memory-limit", limit, "--max-num-batched-tokens", "256", *more]
    server = LiveServer(hungry_model(tmp_path), *flags)
    watch = Watch(server.process.pid)
    try:
        watch.look()
        started = watch.peak
        watch.start()
        states = ("free", "cached", "used", "as_states")
        pages = sum(server.metric(f'plait:pages{{state="{state}"}}') for state in states)
        requests = round(1.5 * pages * 16 / 850)  # one and a half arenas full
        ends = load(server, requests, random.Random(1))
        assert sum(ends.values()) == requests
        assert min(ends.values()) > 0
        assert until(lambda: idle(server))
        watch.stop()
        free = server.metric('plait:pages{state="free"}')
        assert free < 0.05 * pages, "the load was too small to prove anything"
        print(f"{limit}: {started:,} bytes at start, {watch.peak:,} at most, in {watch.samples} looks")
        assert started <= MOST * parse_bytes(limit)
        assert watch.peak <= MOST * parse_bytes(limit)
        assert watch.peak > parse_bytes(limit) - SPARE, "memory that could serve lies idle"
    finally:
        server.stop()
