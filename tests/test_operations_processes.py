"""Several API processes in front of one engine, as real processes: one server to whoever looks at it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from left_behind import NOTHING, Traces
from live import LiveServer, alive, small_model, until
from streams import BODY, begun, ends, refused

from plait.server.board import Board
from plait.server.listener import bind, bind_several

COUNT = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    flags = ["--log-format", "json", "--log-stats-interval", "0.2", "--max-waiting", "500"]
    server = LiveServer(model, "--api-server-count", str(COUNT), *flags)
    yield server
    assert server.stop() == 0
    assert not alive(server.engine_pid)


def logged(server: LiveServer, logger: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, list(server.lines)) if line["logger"] == f"plait.{logger}"]


def ask(url: str, **fields: Any) -> httpx.Response:
    """On a connection of its own, which may be any process's."""
    body = BODY | {"stream": False, "max_tokens": 3} | fields
    return httpx.post(url + "/v1/completions", json=body, timeout=60, verify=False)


def answering(server: LiveServer) -> dict[str, int]:
    """Name and id of each process that has answered."""
    return {line["process"]: line["pid"] for line in logged(server, "access")}


def seen(server: LiveServer, name: str) -> set[float]:
    """A metric as many processes tell it."""
    with ThreadPoolExecutor(4) as pool:
        return set(pool.map(lambda _: server.metric(name), range(24)))


def test_connections_are_spread_and_figures_are_the_server_s(server: LiveServer) -> None:
    before = server.metric("vllm:e2e_request_latency_seconds_count") if answering(server) else 0.0
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(server.url, seed=i), range(60)))
    assert [a.status_code for a in answers] == [200] * 60
    assert len({a.json()["id"] for a in answers}) == 60
    assert until(lambda: len(logged(server, "access")) >= 60)
    assert len(answering(server)) == COUNT
    assert seen(server, "vllm:e2e_request_latency_seconds_count") == {before + 60}
    assert seen(server, "vllm:generation_tokens_total") == {(before + 60) * 3}
    assert seen(server, 'vllm:request_success_total{finished_reason="length"}') == {before + 60}


def test_equal_requests_get_equal_answers_from_all(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(
            lambda _: ask(server.url, seed=4, temperature=1).json()["choices"][0]["text"], range(24)
        )
    assert len(set(texts)) == 1


def test_unseeded_requests_of_two_processes_share_no_seed(server: LiveServer) -> None:
    # The server's --seed makes the series of seeds a fixed one; each process takes its own part of it.
    def text(_: int) -> str:
        return str(ask(server.url, temperature=1, max_tokens=12).json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(text, range(24)))) == 24


def test_one_that_dies_takes_its_requests_along_and_no_others(server: LiveServer) -> None:
    ask(server.url)
    count = server.metric("vllm:e2e_request_latency_seconds_count")
    pids = {pid for line in logged(server, "access") if alive(pid := line["pid"])}
    while len(pids) < COUNT:
        ask(server.url)
        pids = {pid for line in logged(server, "access") if alive(pid := line["pid"])}
    count = server.metric("vllm:e2e_request_latency_seconds_count")
    streams = begun(server.url, tokens=2000, count=COUNT * 10)
    os.kill(min(pids), signal.SIGKILL)

    def given_up() -> bool:
        """The engine goes on with the others alone: nobody waits for those answers any more."""
        broken = sum(s.broke.is_set() for s in streams)
        return 0 < broken == len(streams) - logged(server, "stats")[-1]["running"]

    assert until(given_up, 60)
    lost = [s for s in streams if s.broke.is_set()]
    rest = len(streams) - len(lost)
    assert rest > 0
    assert ends([s for s in streams if s not in lost]) == {"whole": rest}
    # Another takes its place, on the same socket: connections that came meanwhile wait for it.
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(server.url, seed=i), range(40)))
    assert [a.status_code for a in answers] == [200] * 40
    assert until(lambda: len({p for p in answering(server).values() if alive(p)}) == COUNT)
    assert seen(server, "vllm:e2e_request_latency_seconds_count") == {count + rest + 40}
    assert server.metric('plait:pages{state="used"}') == 0


def test_the_line_of_figures_comes_from_one(server: LiveServer) -> None:
    shown = logged(server, "stats")
    assert {line["pid"] for line in shown} == {server.process.pid}
    assert max(line["running"] for line in shown) >= 1


@pytest.mark.slow
def test_sigterm_under_load(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces(tmp_path / "tmp")
    for name, value in traces.environment().items():
        monkeypatch.setenv(name, value)
    server = LiveServer(model, "--api-server-count", "2", "--shutdown-timeout", "120")
    assert len(traces.processes()) == 4
    streams = begun(server.url, tokens=1200)
    server.process.send_signal(signal.SIGTERM)
    assert until(lambda: httpx.get(server.url + "/ready").status_code == 503)
    assert until(lambda: {refused(server.url).status_code for _ in range(8)} == {503})
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(refused, [server.url] * 40))
    assert {(a.status_code, "retry-after" in a.headers) for a in answers} == {(503, True)}
    assert ends(streams) == {"whole": len(streams)}
    assert server.process.wait(30) == 0
    assert traces.left() == NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_at_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    traces = Traces(tmp_path / "tmp")
    for name, value in traces.environment().items():
        monkeypatch.setenv(name, value)
    server = LiveServer(model, "--api-server-count", "2", "--shutdown-timeout", "300")
    streams = begun(server.url, tokens=3500, count=6)
    server.process.send_signal(number)
    if number == signal.SIGTERM:
        assert until(lambda: httpx.get(server.url + "/ready").status_code == 503)
        server.process.send_signal(number)
    assert server.process.wait(15) == (0 if number == signal.SIGTERM else -number)
    assert "whole" not in ends(streams)
    assert until(lambda: not traces.processes(), 15)
    if number == signal.SIGTERM:
        assert traces.left() == NOTHING


# -- the parts -------------------------------------------------------------------------------------


def test_one_port_for_several_sockets() -> None:
    socks = bind_several("127.0.0.1", 0, 3)
    try:
        [address] = {sock.getsockname() for sock in socks}
        assert all(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) for sock in socks)
        for share in (lambda: bind(*address), lambda: bind_several(*address, 2)):
            with pytest.raises(ValueError, match="choose another --port"):  # no second server slips in
                share()
    finally:
        for sock in socks:
            sock.close()


def test_a_board_adds_up_over_processes(tmp_path: Path) -> None:
    boards = [Board(tmp_path / "waiting", i, 3) for i in range(3)]
    for i, board in enumerate(boards):
        board.set(10**i)
    assert [board.total() for board in boards] == [111] * 3
    again = Board(tmp_path / "waiting", 1, 3)  # its process died, and another has its place
    assert boards[0].total() == again.total() == 101
    boards[2].set(0)
    assert again.total() == 1
