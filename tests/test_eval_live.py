"""``plait eval`` against a real server and real engines, with a small hybrid of random weights.

Its answers are nonsense, but always the same: a file of its own answers is the gate it must pass.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from live import DUMMY, LiveServer, small_model
from scripted import ScriptedEngine
from sockets import listening
from thinking import TEMPLATE

from plait import cli
from plait.eval.question import held_out
from plait.eval.targets import Asking, HTTPTarget

FLAGS = ("--max-model-len", "2000", "--cpu-threads", "1")
PROMPTS = ("one", "two words", "a longer prompt, which says nothing", "42", "last of all")
MAX_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int | str | None
    stdout: str
    stderr: str


def evaluate(*arguments: str) -> Done:
    """``plait eval`` as its entry point runs it, in this process, since a new one takes seconds to import."""
    out, err = io.StringIO(), io.StringIO()
    command = ["plait", "eval", *arguments, "--max-tokens", str(MAX_TOKENS)]
    with mock.patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
            code: int | str | None = 0
        except SystemExit as end:
            code = end.code
    return Done(code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    server = LiveServer(model, *FLAGS)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def own_answers(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model answers, as the answers that are expected; the last one is made wrong."""
    lines = []
    for prompt in PROMPTS:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": MAX_TOKENS}
        reply = httpx.post(server.url + "/v1/chat/completions", json=body).json()
        lines.append({"question": prompt, "answer": reply["choices"][0]["message"]["content"]})
    assert len({line["answer"] for line in lines}) == len(PROMPTS)
    lines[-1]["answer"] += "?"
    path = tmp_path_factory.mktemp("data") / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_server_is_asked(server: LiveServer, own_answers: Path, tmp_path: Path):
    written = tmp_path / "result.json"
    done = evaluate("-", "--base-url", server.url, "--data", str(own_answers), "--output", str(written))
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if "own" in line)
    assert row[:4] == ["own", "5", "4", "0.800"]
    assert "own/5: wanted" in done.stderr  # the wrong answer is shown
    result = json.loads(written.read_text())
    assert result["schema"] == "plait.eval/1"
    [side] = result["sides"]
    assert side["scores"][0] | {"low": 0, "high": 0} == {
        "kind": "own", "count": 5, "right": 4, "errors": 0, "accuracy": 0.8, "low": 0, "high": 0,
    }  # fmt: skip
    assert [answer["right"] for answer in side["answers"]] == [True] * 4 + [False]
    assert all(answer["output_tokens"] == MAX_TOKENS for answer in side["answers"])
    assert "api_key" not in result["settings"]


def test_an_engine_started_here_says_the_same(model: Path, own_answers: Path):
    done = evaluate(str(model), *DUMMY, *FLAGS, "--data", str(own_answers), "--min", "0.8")
    assert done.returncode == 0, done.stderr
    assert "0.800" in done.stdout
    done = evaluate(str(model), *DUMMY, *FLAGS, "--data", str(own_answers), "--min", "own=0.81")
    assert done.returncode == 1
    assert "0.810, missed" in done.stdout


def test_two_configurations_are_compared(model: Path, own_answers: Path, tmp_path: Path):
    """Settings that must not change an answer do not; other weights do."""
    written = tmp_path / "pairs.json"
    common = (str(model), *DUMMY, *FLAGS, "--data", str(own_answers), "--output", str(written))
    done = evaluate(*common, "--paired", "max_num_batched_tokens=64,max_num_seqs=1", "seed=2")
    assert done.returncode == 0, done.stderr
    assert "0 of 5 answers are the same" in done.stdout
    result = json.loads(written.read_text())
    assert [side["scores"][0]["right"] for side in result["sides"]] == [4, 0]
    assert result["paired"]["own"] == {
        "count": 5, "first_only": 4, "second_only": 0, "difference": -0.8, "p": 0.125,
    }  # fmt: skip


def test_files_of_one_name_are_refused(own_answers: Path, tmp_path: Path):
    other = tmp_path / own_answers.name
    other.write_text(own_answers.read_text())
    done = evaluate("-", "--base-url", "http://x", "--data", str(own_answers), "--data", str(other))
    assert done.returncode == 2
    assert "two kinds or files of the name own" in done.stderr


def test_an_engine_and_a_server_are_compared(model: Path, server: LiveServer, own_answers: Path):
    """The server's model goes by another name than its files here."""
    common = (*DUMMY, *FLAGS, "--data", str(own_answers))
    done = evaluate(str(model), *common, "--paired", "enable_prefix_caching=false", server.url)
    assert done.returncode == 0, done.stderr
    assert "5 of 5 answers are the same" in done.stdout


def test_servers_are_compared_by_their_urls(server: LiveServer, own_answers: Path):
    done = evaluate("-", "--data", str(own_answers), "--paired", server.url, server.url + "/v1")
    assert done.returncode == 0, done.stderr
    assert "5 of 5 answers are the same" in done.stdout


def test_a_question_without_an_answer_fails_the_gate(server: LiveServer, tmp_path: Path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question": "word " * 5000, "answer": "x"}) + "\n")
    done = evaluate("-", "--base-url", server.url, "--data", str(long))
    assert done.returncode == 1
    assert "1 questions got no answer" in done.stderr
    assert "status 400" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("-", "--base-url", "http://127.0.0.1:9"), "cannot be reached"),
        (("-", "--kinds", "poems"), "there is no kind 'poems'"),
        (("-", "--kinds", "", "--items", "3"), "nothing is asked"),
        (("-", "--items", "0"), "give a number of questions"),
        (("-", "--base-url", "http://x", "--paired", "http://a", "http://b"), "leave out --base-url"),
        (("-", "--data", "/nowhere/there.jsonl", "--base-url", "http://127.0.0.1:9"), "/nowhere/there.jsonl"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: tuple[str, ...], fault: str):
    done = evaluate(*arguments)
    assert done.returncode == 2
    assert fault in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


# -- what a server may say ------------------------------------------------------------------------


def test_calls_come_through_a_server():
    """A held-out call, written as the model would write it, is read by the server and found right."""
    [question] = held_out("calls", 1)
    call = question.wanted
    name, arguments = call.removesuffix(")").split("(", 1)
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in json.loads(arguments).items()
    )
    said = f"</think>\n\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    async def ask(url: str) -> Any:
        target = HTTPTarget(url)
        await target.connect()
        try:
            return await target.ask(question, Asking(), 1)
        finally:
            await target.close()

    for text, right in ((said, True), (said.replace(name, "f"), False), ("</think>\n\nNo.", False)):
        with listening(ScriptedEngine(text, None, TEMPLATE, 10_000)) as url:
            answer = asyncio.run(ask(url))
        assert answer.error is None
        assert question.right(answer) == right


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (200, "hello", "no chat completion"),
        (200, '{"choices": []}', "no chat completion"),
        (500, '{"error": {"message": "out of order"}}', "status 500: out of order"),
        (502, "<html>", "status 502: <html>"),
    ],
)
def test_odd_servers(status: int, body: str, fault: str):
    with odd_server(lambda _: (status, {}, body)) as url:
        assert fault in asyncio.run(ask_once(url)).error


def test_a_full_server_is_asked_again():
    completion = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    seen: list[int] = []

    def reply(number: int) -> tuple[int, dict[str, str], str]:
        seen.append(number)
        return (429, {"Retry-After": "0.1"}, "") if number < 3 else (200, {}, json.dumps(completion))

    with odd_server(reply) as url:
        said = asyncio.run(ask_once(url))
    assert (said.content, said.error, seen) == ("4", None, [1, 2, 3])


async def ask_once(url: str) -> Any:
    target = HTTPTarget(url, "model")
    try:
        return await target.ask(held_out("sums", 1)[0], Asking(), 1)
    finally:
        await target.close()


@contextmanager
def odd_server(reply: Callable[[int], tuple[int, dict[str, str], str]]) -> Iterator[str]:
    """A server that says what ``reply`` gives for the number of the request."""
    count = itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, body = reply(next(count))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
