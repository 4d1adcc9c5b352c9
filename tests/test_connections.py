"""What a connection may do, and for how long."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import httpx
import pytest
from scripted import ScriptedEngine
from sockets import listening

from plait.server import ServerSettings
from plait.server.connections import MOST_HEAD_BYTES, SLOWEST_BODY
from plait.server.json_body import BadJSON, read


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    assert address.port is not None
    return socket.create_connection((address.host, address.port), timeout=10)


def rest(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def head(length: int) -> bytes:
    fields = (
        f"host: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    )
    return b"POST /v1/completions HTTP/1.1\r\n" + fields.encode()


def test_where_all_connections_are_busy_one_more_is_told_to_come_back() -> None:
    settings = ServerSettings(max_connections=2)
    engine = ScriptedEngine(hang_after=0)
    with listening(engine, settings) as url, httpx.Client(base_url=url) as first, httpx.Client() as second:
        body = {"prompt": "ab", "stream": True}
        with (
            first.stream("POST", "/v1/completions", json=body) as a,
            second.stream("POST", url + "/v1/completions", json=body) as b,
        ):
            lines = [response.iter_lines() for response in (a, b)]
            assert all(next(each).startswith("data: ") for each in lines)
            refused = httpx.get(url + "/health")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "--max-connections" in refused.json()["error"]["message"]
            engine.aborted.set()
            assert all(list(each) for each in lines)
        assert httpx.get(url + "/health").status_code == 200


def test_the_longest_idle_makes_room() -> None:
    with listening(ScriptedEngine(), ServerSettings(max_connections=2)) as url:
        idle, busy = connect(url), connect(url)
        busy.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert busy.recv(4096).startswith(b"HTTP/1.1 200")
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # now the other is the longest idle
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        assert httpx.get(url + "/health").status_code == 200
        assert busy.recv(4096) == b""
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")


def test_heads_are_bounded_and_count_anew_for_each_request() -> None:
    large = {"x-large": "y" * (MOST_HEAD_BYTES // 2)}
    body = {"prompt": "ab", "user": "u" * 2 * MOST_HEAD_BYTES}
    with listening(ScriptedEngine()) as url, httpx.Client(base_url=url) as client:
        for _ in range(4):
            assert client.post("/v1/completions", json=body, headers=large).status_code == 200
        refused = client.get("/health", headers={"x-large": "y" * MOST_HEAD_BYTES})
        assert refused.status_code == 431
        assert str(MOST_HEAD_BYTES) in refused.json()["error"]["message"]


@pytest.mark.parametrize("steady", [True, False])
def test_a_long_body_may_take_long_if_it_comes_steadily(steady: bool) -> None:
    """Bytes buy time: a slow uplink is not a client that drips."""
    seconds = 0.3
    body = json.dumps({"prompt": "ab", "user": "u" * 4 * SLOWEST_BODY}).encode()
    settings = ServerSettings(client_timeout=seconds)
    with listening(ScriptedEngine(), settings) as url, connect(url) as connection:
        connection.sendall(head(len(body)) + (body[: -1 if steady else 100]))
        connection.settimeout(5 * seconds)
        started = time.monotonic()
        if steady:
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.sendall(body[-1:])
        connection.settimeout(10)
        assert rest(connection).startswith(b"HTTP/1.1 200" if steady else b"HTTP/1.1 408")
        assert time.monotonic() - started > (5 if steady else 1) * seconds


def test_no_time_runs_while_an_answer_is_awaited() -> None:
    engine = ScriptedEngine(hang_after=0)
    with listening(engine, ServerSettings(client_timeout=0.2)) as url:
        connection = connect(url)
        body = b'{"prompt": "ab"}'
        connection.sendall(head(len(body)) + body)
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        engine.aborted.set()
        connection.settimeout(10)
        assert rest(connection).startswith(b"HTTP/1.1 200")


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    code = (
        "import resource; from plait.server.connections import openable;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000));"
        "print(openable(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0], openable(5000))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    room = 1000 - 128
    assert ended.stdout.split() == ["500", "628", str(room)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "the name 'b' stands twice"),
        (b'{"a": 1e999}', "'1e999' is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": -Infinity}', "-Infinity"),
        ('{"a": "é"}'.encode("latin-1"), "byte 7 is 0xe9"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": "\x00"}', "control character at character 7"),
        (b"[" * 501 + b"]" * 501, "nests more than 500 levels"),
        (b'{"a":' * 501 + b"1" + b"}" * 501, "nests more than 500 levels"),
        (b"[" * 10**6, "nests more than 500 levels"),
    ],
)
def test_what_is_no_json(body: bytes, words: str) -> None:
    with pytest.raises(BadJSON, match=words):
        read(body)


def test_what_is_json() -> None:
    text = '{"a": [1, -0.5, 1e300, "\\u00e9é", null, true], "b": {"a": {}}, "": "[[{"}'
    assert read(text.encode()) == json.loads(text)
    assert read(b"[" * 500 + b"]" * 500)
    assert read(b'["' + b"[" * 1000 + b'"]')
