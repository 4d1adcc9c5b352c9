"""The end of a server and its beginning: signals under load, what is left behind, TLS. Real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import trustme
from left_behind import NOTHING, Traces
from live import DUMMY, LiveServer, alive, small_model, until
from streams import BODY, STREAMS, begun, ends, refused


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traces:
    traces = Traces(tmp_path / "tmp")
    for name, value in traces.environment().items():
        monkeypatch.setenv(name, value)
    return traces


def test_sigterm_under_load(model: Path, traces: Traces) -> None:
    server = LiveServer(
        model, "--shutdown-timeout", "120", "--log-format", "json", "--log-stats-interval", "0.2"
    )
    assert len(traces.processes()) >= 2  # the marks work
    streams = begun(server.url, tokens=1200)
    assert server.metric("vllm:num_requests_running") == STREAMS
    kept = httpx.Client(base_url=server.url, timeout=10)
    assert kept.get("/ready").status_code == 200  # a connection from before the signal
    server.process.send_signal(signal.SIGTERM)
    assert until(lambda: kept.get("/ready").status_code == 503)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(refused, [server.url] * 40))
    assert {a.status_code for a in answers} == {503}
    assert all(int(a.headers["retry-after"]) > 0 for a in answers)
    assert {a.json()["error"]["code"] for a in answers} == {"draining"}
    assert kept.get("/health").status_code == kept.get("/live").status_code == 200
    assert server.metric("vllm:num_requests_running") > 0  # nobody had ended before all this
    kept.close()
    assert ends(streams) == {"whole": STREAMS}
    assert server.process.wait(20) == 0
    assert traces.left() == NOTHING
    check_log(server)


def check_log(server: LiveServer) -> None:
    """Every line from start to end is an object, and what there is to know about the load is among them."""
    server.join()
    lines = [json.loads(line) for line in server.lines]
    by = {name: [line for line in lines if line["logger"] == f"plait.{name}"] for name in ("access", "stats")}
    assert {"time", "level", "logger", "message", "pid"} <= set.intersection(*map(set, lines))
    assert sum("stage" in line for line in lines) >= 4
    [ready] = [line for line in lines if "decisions" in line]
    assert ready["url"] == server.url
    assert len(ready["decisions"]) > 5
    assert Counter(line["status"] for line in by["access"]) == {200: STREAMS, 503: 40}
    assert len({line["request_id"] for line in by["access"]}) == STREAMS + 40
    assert max(line["running"] for line in by["stats"]) == STREAMS
    assert max(line["generation_tokens_per_second"] for line in by["stats"]) > 0
    assert not [line for line in server.lines if "Tale" in line]  # nobody's prompt


@pytest.mark.slow
def test_answers_that_do_not_end_in_time_get_an_error(model: Path, traces: Traces) -> None:
    server = LiveServer(model, "--shutdown-timeout", "0.5")
    streams = begun(server.url, tokens=3500, count=4)
    server.process.send_signal(signal.SIGTERM)
    assert ends(streams) == {"engine_dead": 4}
    assert "shutting down" in json.loads(streams[0].events[-1])["error"]["message"]
    assert server.process.wait(20) == 0
    assert traces.left() == NOTHING


def test_a_second_sigterm_ends_at_once(model: Path, traces: Traces) -> None:
    server = LiveServer(model, "--shutdown-timeout", "300")
    streams = begun(server.url, tokens=3500)
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as deaf:
        body = json.dumps(BODY | {"max_tokens": 3500, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        deaf.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)  # and never reads
        assert until(lambda: server.metric("vllm:num_requests_running") == STREAMS + 1, 30)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: httpx.get(server.url + "/ready").status_code == 503)
        assert server.process.poll() is None
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 5
    assert ends(streams) == {"engine_dead": STREAMS}
    assert traces.left() == NOTHING


@pytest.mark.slow
def test_the_server_ends_with_its_engine_where_asked(model: Path, traces: Traces) -> None:
    server = LiveServer(model, "--exit-with-engine")
    streams = begun(server.url, tokens=3500, count=4)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.process.wait(20) == 2
    assert ends(streams) == {"engine_dead": 4}
    server.join()
    assert "killed by SIGKILL" in server.lines[-1]
    assert traces.left() == NOTHING


@pytest.mark.slow
def test_kill_takes_the_engine_along(model: Path, traces: Traces) -> None:
    server = LiveServer(model)
    streams = begun(server.url, tokens=3500, count=4)
    server.process.kill()
    server.process.wait(10)
    assert until(lambda: not alive(server.engine_pid), 10)
    assert ends(streams).total() == 4
    assert traces.left() == NOTHING


# -- while the model is loaded -----------------------------------------------------------------------


class Starting:
    """A `plait serve` that has not said yet that it is ready."""

    def __init__(self, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "plait", "serve", str(model), "--port", str(port), *DUMMY]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def status(self, path: str) -> int | None:
        """None: nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=30).status_code
        except httpx.ConnectError:
            return None


@pytest.fixture
def starting(model: Path, traces: Traces) -> Iterator[Starting]:
    server = Starting(model)
    yield server
    server.process.kill()
    server.process.wait()


def test_probes_while_the_model_is_loaded(starting: Starting, traces: Traces) -> None:
    assert until(lambda: starting.status("/live") == 200, 60)
    assert (starting.status("/ready"), starting.status("/health")) == (503, 503)
    early = refused(starting.url)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
    assert int(early.headers["retry-after"]) > 0
    assert until(lambda: starting.status("/ready") == 200, 60)
    assert starting.status("/health") == 200
    assert refused(starting.url).status_code == 200  # it is taken: the first request that may be
    starting.process.terminate()
    assert starting.process.wait(20) == 0
    assert traces.left() == NOTHING


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGKILL))],
)
def test_signals_while_the_model_is_loaded(
    starting: Starting, traces: Traces, number: signal.Signals
) -> None:
    assert until(lambda: len(traces.processes()) >= 2 or starting.process.poll() is not None, 60)
    assert starting.status("/ready") == 503
    starting.process.send_signal(number)
    assert starting.process.wait(10) == (0 if number != signal.SIGKILL else -number)
    assert until(lambda: traces.left() == NOTHING, 10), traces.left()


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_signals_while_a_model_is_looked_for(
    traces: Traces, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a hub that takes connections and never answers
        silent.settimeout(60)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        server = Starting(Path("someone/something"))
        with silent.accept()[0]:
            assert server.status("/ready") == 503
            server.process.send_signal(number)
            assert server.process.wait(10) == 0
    assert traces.left() == NOTHING


# -- TLS ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tls(model: Path, tmp_path: Path) -> None:
    authority, strangers = trustme.CA(), trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    files = {
        "--ssl-certfile": b"".join(blob.bytes() for blob in own.cert_chain_pems),
        "--ssl-keyfile": own.private_key_pem.bytes(),
        "--ssl-ca-certs": authority.cert_pem.bytes(),
    }
    flags = ["--ssl-cert-reqs", "2"]
    for flag, data in files.items():
        (tmp_path / flag).write_bytes(data)
        flags += [flag, str(tmp_path / flag)]
    server = LiveServer(model, *flags)

    def trusting(*certificates: trustme.LeafCert) -> ssl.SSLContext:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        for certificate in certificates:
            certificate.configure_cert(context)
        return context

    try:
        assert server.url.startswith("https://")
        mutual = trusting(authority.issue_cert("client@plait.example"))
        with httpx.Client(verify=mutual, base_url=server.url, timeout=30) as client:
            assert client.get("/ready").status_code == 200
            with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 5}) as response:
                assert list(response.iter_lines())[-2] == "data: [DONE]"
        for certificates in ((), (strangers.issue_cert("client@plait.example"),)):
            with pytest.raises(httpx.TransportError):
                httpx.get(server.url + "/ready", verify=trusting(*certificates))
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url + "/ready")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/ready")
    finally:
        assert server.stop() == 0
