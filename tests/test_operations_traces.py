"""Spans, as a collector gets them; and what it takes to have none."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from door import Door, at
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from scripted import ScriptedEngine

from plait.server import ServerSettings
from plait.server.tracing import check_endpoint

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An OTLP receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                kept.paths.add(self.path)
                kept.requests.append(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Span]:
        found = [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def told(span: Span) -> dict[str, Any]:
    values = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        values[entry.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return values


async def flush(door: Door) -> None:
    await door.app.state.service.close()


def test_a_span_for_each_request(collector: Collector) -> None:
    async def use(door: Door) -> None:
        door.open()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = await door.ask({"max_tokens": 9}, **headers)
        await door.ask({"stream": True, "n": 2})
        await door.ask({"n": 0})  # refused before the engine: no span
        await door.client.get("/metrics")
        await flush(door)
        first, second = collector.spans()
        assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
        assert second.trace_id.hex() not in (TRACE, "0" * 32)
        assert not second.parent_span_id
        assert (first.name, first.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
        whole = told(first)
        prompt = len("<user>hello<assistant>")
        assert whole["gen_ai.response.id"] == whole["gen_ai.request.id"] == answer.json()["id"]
        assert whole["plait.request_id"] == "mine"
        assert whole["gen_ai.operation.name"] == "chat"
        assert whole["gen_ai.request.model"] == "tiny"
        assert whole["gen_ai.request.max_tokens"] == 9
        assert whole["gen_ai.request.temperature"] == 0.6
        assert whole["gen_ai.response.finish_reasons"] == ["stop"]
        assert whole["gen_ai.usage.input_tokens"] == whole["gen_ai.usage.prompt_tokens"] == prompt
        assert whole["gen_ai.usage.output_tokens"] == whole["gen_ai.usage.completion_tokens"] == 4
        assert whole["gen_ai.usage.cache_read.input_tokens"] == 4
        assert whole["gen_ai.latency.time_in_queue"] == 0.25
        assert 0 <= whole["gen_ai.latency.time_to_first_token"] <= whole["gen_ai.latency.e2e"]
        seconds = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(whole["gen_ai.latency.e2e"], abs=1e-6)
        assert told(second)["gen_ai.usage.output_tokens"] == 8
        assert told(second)["gen_ai.response.finish_reasons"] == ["stop", "stop"]
        [resource] = {r.resource.SerializeToString() for q in collector.requests for r in q.resource_spans}
        assert b"service.name" in resource
        assert collector.paths == {"/v1/traces"}

    at(use, ServerSettings(otlp_traces_endpoint=collector.url))


def test_spans_of_what_went_wrong(collector: Collector) -> None:
    async def use(door: Door) -> None:
        door.open()
        running = asyncio.ensure_future(door.ask())
        while not door.engine.open:
            await asyncio.sleep(0)
        door.engine.dead.set()
        assert (await running).status_code == 503
        await flush(door)
        [span] = collector.spans()
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert "EngineDeadError" in span.status.message
        assert told(span)["gen_ai.response.finish_reasons"] == ["abort"]
        assert told(span)["gen_ai.usage.output_tokens"] == 2

    at(use, ServerSettings(otlp_traces_endpoint=collector.url), lambda: ScriptedEngine(hang_after=1))


def test_a_collector_that_is_away_holds_nothing_up() -> None:
    async def use(door: Door) -> None:
        door.open()
        assert (await door.ask()).status_code == 200
        began = asyncio.get_running_loop().time()
        await flush(door)
        assert asyncio.get_running_loop().time() - began < 10

    at(use, ServerSettings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces"))


def test_endpoints() -> None:
    assert check_endpoint("http://c:4318") == check_endpoint("http://c:4318/") == "http://c:4318/v1/traces"
    assert check_endpoint("https://c/other") == "https://c/other"
    for wrong in ("c:4318", "grpc://c:4317", "", "http://"):
        with pytest.raises(ValueError, match="write it like"):
            check_endpoint(wrong)


@pytest.mark.parametrize("package", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_missing_packages_are_told_at_start(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=r"pip install 'plait\[otel\]'"):
        ServerSettings(otlp_traces_endpoint="http://c:4318")


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from door import Door, at\n"
        "async def use(door):\n"
        "    door.open()\n"
        "    assert (await door.ask()).status_code == 200\n"
        "at(use)\n"
        "packages = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "assert not [m for m in sys.modules if m.startswith(packages)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
