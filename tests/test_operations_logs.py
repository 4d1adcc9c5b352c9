"""What the server writes down, in which form, and what it does not."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from door import Door, at
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine

from plait import logs
from plait.cli_options import log_settings_of
from plait.engine.stats import EngineStats
from plait.logs import LogSettings
from plait.server import ServerSettings
from plait.server.stats_line import StatsLine, in_one_line, log_stats


class Written:
    """What was written to standard error so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def text(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Written]:
    """Standard error of the logs, whose settings are put back afterwards."""
    root, plait = logging.getLogger(), logging.getLogger("plait")
    before = root.level, list(root.handlers), plait.level, sys.excepthook
    token = logs.request_id.set(None)
    yield Written(capsys)
    logs.request_id.reset(token)
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    plait.setLevel(before[2])
    sys.excepthook = before[3]
    logging.captureWarnings(False)


def lines(stream: Written) -> list[dict[str, Any]]:
    """The objects, one of each line."""
    return [json.loads(line) for line in stream.text().splitlines()]


# -- lines -------------------------------------------------------------------------------------------


def test_a_line_is_an_object(written: Written) -> None:
    logs.configure(LogSettings("info", "json", process="api-1"))
    log = logging.getLogger("plait.somewhere")
    logs.request_id.set("r1")
    log.info(
        "two\nlines of %s", "text", extra={"fields": {"seconds": 0.5, "message": "not this", "odd": {1}}}
    )
    log.debug("not shown")
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("it failed")
    logging.getLogger("other").info("not shown")
    logging.getLogger("other").warning("shown")
    first, second, third = lines(written)
    assert first["message"] == "two\nlines of text"
    assert (first["level"], first["logger"], first["process"]) == ("info", "plait.somewhere", "api-1")
    assert (first["request_id"], first["seconds"], first["odd"]) == ("r1", 0.5, "{1}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", first["time"])
    assert "KeyError: 'lost'" in second["exception"]
    assert third["logger"] == "other"


def test_text_for_people(written: Written) -> None:
    logs.configure(LogSettings("debug", "text"))
    logs.request_id.set("r1")
    logging.getLogger("plait.server.run").debug("it %s", "works", extra={"fields": {"a": 1}})
    assert re.fullmatch(r"\d\d:\d\d:\d\d DEBUG run: it works \[r1\]\n", written.text())


def test_what_ends_the_program_is_a_line_too(written: Written) -> None:
    logs.configure(LogSettings("info", "json"))
    try:
        raise RuntimeError("at last")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    [line] = lines(written)
    assert line["level"] == "critical"
    assert "RuntimeError: at last" in line["exception"]


def test_settings_are_read_before_the_command_line() -> None:
    assert log_settings_of(["serve", "m"]) == LogSettings("info", "text")
    assert log_settings_of(["serve", "m", "--log-format=json", "--log-level", "debug"]) == LogSettings(
        "debug", "json"
    )
    assert log_settings_of(["generate", "m"]).level == "warning"
    for wrong in (["--log-format", "xml"], ["--log-level"]):
        with pytest.raises(ValueError, match=r"it is one of"):
            log_settings_of(["serve", "m", *wrong])


# -- requests ----------------------------------------------------------------------------------------

SECRET = "the-secret-of-the-prompt"
SECRETIVE: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}]}


def served(written: Written, settings: ServerSettings, engine: Any = ScriptedEngine) -> list[httpx.Response]:
    """Answers to a few requests; what is logged meanwhile is in ``written``."""
    logs.configure(settings.logs)

    async def use(door: Door) -> list[httpx.Response]:
        early = await door.ask()
        door.open()
        await door.client.get("/metrics")
        return [
            early,
            await door.ask(SECRETIVE, **{"x-request-id": "mine-1"}),
            await door.ask(SECRETIVE | {"stream": True}, **{"x-request-id": "line\tbreak"}),
            await door.ask(SECRETIVE | {"n": 0}),
        ]

    return at(use, settings, engine)


def test_a_line_for_each_request(written: Written) -> None:
    early, whole, stream, bad = served(written, ServerSettings(log_format="json"))
    shown = [line for line in lines(written) if line["logger"] == "plait.access"]
    assert [line["status"] for line in shown] == [503, 200, 200, 400]
    answers = (early, whole, stream, bad)
    assert [line["request_id"] for line in shown] == [r.headers["x-request-id"] for r in answers]
    assert whole.headers["x-request-id"] == whole.headers["request-id"] == "mine-1"
    assert re.fullmatch(
        "[0-9a-f]{32}", stream.headers["x-request-id"]
    )  # the client's was not fit to be logged
    assert len({r.headers["x-request-id"] for r in answers}) == 4
    assert {(line["method"], line["path"], line["whole"]) for line in shown} == {
        ("POST", "/v1/chat/completions", True)
    }
    assert all(0 <= line["seconds"] < 10 for line in shown)
    assert SECRET not in written.text()


def test_lines_that_are_not_wanted(written: Written) -> None:
    served(written, ServerSettings(log_format="json", disable_access_log=True))
    assert written.text() == ""
    served(written, ServerSettings(disable_access_log_for_endpoints="/v1/models, /v1/chat/completions"))
    assert written.text() == ""
    served(written, ServerSettings(log_format="json", log_level="debug"))
    assert "/metrics" in {line["path"] for line in lines(written) if line["logger"] == "plait.access"}


def test_an_answer_that_was_cut_off(written: Written) -> None:
    logs.configure(LogSettings("info", "json"))
    cuts = []

    async def use(door: Door) -> None:
        from plait.server.journal import Journal

        async def breaks(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ConnectionResetError

        async def send(message: Any) -> None:
            cuts.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("::1", 5)}
        with pytest.raises(ConnectionResetError):
            await Journal(breaks)(scope, None, send)  # type: ignore[arg-type]

    at(use)
    [line] = lines(written)
    assert (line["whole"], line["status"], line["client"]) == (False, 200, "::1:5")
    assert line["message"].endswith("cut off")


def test_prompts_are_written_where_asked(written: Written) -> None:
    served(written, ServerSettings(log_format="json", enable_log_requests=True, max_log_len=12))
    shown = [line for line in lines(written) if line["logger"] == "plait.requests"]
    assert len(shown) == 2  # those that reached the engine
    for line in shown:
        assert line["prompt"] == f"<user>{SECRET}"[:12]
        assert line["prompt_tokens"] == len(f"<user>{SECRET}<assistant>")
        assert line["id"].startswith("chatcmpl-")
        assert line["params"]["temperature"] == 0.6
    assert shown[0]["request_id"] == "mine-1"
    assert SECRET not in written.text()


def test_a_fault_of_the_server_is_found_by_its_request(written: Written) -> None:
    class Broken(ScriptedEngine):
        def _delta(self, *args: Any) -> Any:
            raise ZeroDivisionError("inside")

    _, whole, *_ = served(written, ServerSettings(log_format="json"), Broken)
    assert whole.status_code == 500
    faults = [line for line in lines(written) if "exception" in line]
    assert faults[0]["request_id"] == "mine-1"
    assert "ZeroDivisionError: inside" in faults[0]["exception"]
    assert SECRET not in written.text()


# -- statistics --------------------------------------------------------------------------------------

work = st.tuples(
    st.floats(0.1, 100),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.integers(0, 300),
)


@given(st.lists(work, min_size=1, max_size=20))
def test_rates_add_up(series: list[tuple[float, int, int, int, int]]) -> None:
    line, at, total = StatsLine(), 5.0, EngineStats(pages_total=10)
    line.begin(total, at)
    for seconds, prompts, tokens, running, waiting in series:
        at += seconds
        total = replace(
            total,
            generation_tokens_total=total.generation_tokens_total + tokens,
            computed_tokens_total=total.computed_tokens_total + tokens + prompts,
            running=running,
            waiting=waiting,
        )
        fields = line.fields(total, at)
        if not (prompts or tokens or running or waiting):
            assert fields is None  # silent
            continue
        assert fields is not None
        assert fields["generation_tokens_per_second"] == pytest.approx(tokens / seconds, abs=0.051)
        assert fields["prompt_tokens_per_second"] == pytest.approx(prompts / seconds, abs=0.051)
        assert f"Running: {running} reqs, Waiting: {waiting} reqs" in in_one_line(fields)


def test_hit_rate_is_that_of_the_last_prompts() -> None:
    line = StatsLine()
    line.begin(EngineStats(prompt_tokens_total=100, cached_tokens_total=100), 0)
    fields = line.fields(EngineStats(prompt_tokens_total=300, cached_tokens_total=150, running=1), 10)
    assert fields is not None
    assert fields["prefix_cache_hit_rate"] == 0.25
    fields = line.fields(EngineStats(prompt_tokens_total=300, cached_tokens_total=150, running=1), 20)
    assert fields is not None
    assert fields["prefix_cache_hit_rate"] == 0.25
    assert "Prefix cache hit rate: 25.0%" in in_one_line(fields)


def test_statistics_end_with_the_engine(written: Written) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        task = asyncio.create_task(log_stats(engine.stats, 0.001))
        async with asyncio.timeout(10):
            while not written.text():
                await asyncio.sleep(0)
        engine.dead.set()
        await asyncio.wait_for(task, 5)

    logs.configure(LogSettings("info", "json"))
    asyncio.run(run())
    assert {line["logger"] for line in lines(written)} == {"plait.stats"}
    assert lines(written)[0]["running"] == 1
