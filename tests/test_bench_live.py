"""``plait bench`` against a real server, real engines and kernels, with a small hybrid of random weights."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer, small_model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from plait.bench import commands
from plait.bench.memory import process_tree, pss_bytes
from plait.bench.record import Record
from plait.bench.settings import OutputArgs, ServerArgs, TrafficArgs
from plait.bench.target import Clock, Message, TargetError
from plait.config import EngineArgs

DOCUMENT = {"schema", "kind", "plait", "date", "machine", "settings"}
RESULT = {"target", "seed", "duration", "figures", "memory", "requests"}
REQUEST = {
    "label", "turn", "scheduled", "sent", "chunks", "ended", "prompt_tokens", "output_tokens",
    "cached_tokens", "counted_by", "finish_reason", "error",
}  # fmt: skip
FIGURES = {
    "duration", "completed", "failed", "input_tokens", "output_tokens", "cached_tokens", "token_counts",
    "ttft", "itl", "tpot", "e2e", "request_rate", "input_rate", "output_rate", "total_rate", "cached_share",
    "user_speed",
}  # fmt: skip
SUMMARY = {"count", "mean", "p50", "p90", "p95", "p99", "max"}
"""Keys of the JSON files. Whoever removes one raises plait.bench.run.SCHEMA."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    server = LiveServer(model, "--max-model-len", "2000", "--cpu-threads", "1")
    yield server
    assert server.stop() == 0


def traffic(**fields: Any) -> TrafficArgs:
    small = {"num_prompts": 4, "random_input_len": 40, "random_output_len": 6, "num_warmups": 1}
    return TrafficArgs(**small | {"traffic_seed": 7} | fields)


def measured(
    server: LiveServer, args: TrafficArgs, out: OutputArgs | None = None, **fields: Any
) -> dict[str, Any]:
    """The result of ``plait bench serve``."""
    asked = ServerArgs(**fields)
    return asyncio.run(commands.serve(server.url, asked, args, [server.engine_pid], out or OutputArgs()))


def test_serve_writes_json_and_html(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = OutputArgs(output=str(tmp_path / "out" / "result.json"), html=str(tmp_path / "report.html"))
    args = traffic(profile="mix", short_input_len=16, long_input_len=80, long_share=0.5, max_concurrency=2)
    measured(server, args, out, prompts="tokens", vocab_size=400)
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert document.keys() == DOCUMENT | {"traffic", "result"}
    assert (document["schema"], document["kind"]) == (1, "serve")
    result = document["result"]
    assert result.keys() == RESULT
    assert all(request.keys() == REQUEST for request in result["requests"])
    assert result["figures"].keys() == {"all", "long", "short"}
    figures = result["figures"]["all"]
    assert figures.keys() == FIGURES
    assert figures["ttft"].keys() == SUMMARY
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (4, 0, 24)
    assert figures["input_tokens"] == 2 * 16 + 2 * 80
    assert figures["token_counts"] == "usage"
    assert figures["cached_share"] == 0
    assert result["memory"]["peak"] > 30 * 2**20
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 4
    assert 'src="http' not in page
    assert "href=" not in page
    assert "TTFT" in capsys.readouterr().out


def test_conversations_and_shared_prefixes_are_found_in_the_cache(server: LiveServer, model: Path) -> None:
    talk = traffic(profile="conversation", num_prompts=1, turns=3, prefix_len=64)
    sized = {"tokenizer": str(model)}
    talks = measured(server, talk, **sized)["result"]
    later = [r for r in talks["requests"] if r["turn"]]
    assert [r["turn"] for r in later] == [1, 2]
    assert all(r["cached_tokens"] >= 48 for r in later)
    shared = traffic(profile="shared-prefix", prefix_len=96, num_prompts=5, random_input_len=10)
    siblings = measured(server, shared, endpoint="chat", **sized)["result"]["requests"]
    assert all(r["cached_tokens"] >= 64 for r in siblings[2:])


def test_the_same_seed_sends_the_same_prompts(server: LiveServer) -> None:
    args = traffic(num_prompts=2, traffic_seed=99, request_rate=50.0)
    first, second = (measured(server, args)["result"]["figures"]["all"] for _ in range(2))
    assert first["cached_share"] < 0.2
    assert second["cached_share"] > 0.6


def test_compare_two_engine_settings(model: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(model), load_format="dummy", max_model_len=500, cpu_threads=1)
    out = OutputArgs(output=str(tmp_path / "c.json"), html=str(tmp_path / "c.html"))
    asked = traffic(num_prompts=2, num_warmups=1)
    sides = ("default", "max_num_batched_tokens=16")
    document = asyncio.run(commands.compare_engines(args, sides, asked, 2, out))
    comparison = document["comparison"]
    assert comparison["base"] == "default"
    ratios = comparison["ratios"]["max_num_batched_tokens=16"]
    assert {"output_rate", "ttft_p50", "tpot_mean", "e2e_p99"} <= ratios.keys()
    assert ratios["ttft_p50"]["pairs"] == 2
    assert ratios["ttft_p50"]["low"] <= ratios["ttft_p50"]["ratio"] <= ratios["ttft_p50"]["high"]
    runs = comparison["runs"]
    assert len({run["seed"] for run in runs}) == 2  # both sides of a pair get the same prompts
    assert all(run["figures"]["all"]["completed"] == 2 for run in runs)
    assert document["settings"]["engine"]["memory_limit"] is None  # what was asked stays as it was
    assert "<img" in (tmp_path / "c.html").read_text()


# -- other engines' servers ---------------------------------------------------------------------------


@asynccontextmanager
async def modest_server() -> AsyncIterator[str]:
    """A server that knows neither stream_options nor ignore_eos, and reports no usage."""
    import uvicorn

    async def complete(request: Request) -> Response:
        body = await request.json()
        unknown = {"stream_options", "ignore_eos"} & body.keys()
        if unknown:
            return JSONResponse({"error": {"message": f"unknown field {unknown.pop()}"}}, status_code=400)
        if body["prompt"] == "fail":
            return JSONResponse({"error": {"message": "no"}}, status_code=500)
        return StreamingResponse(pieces(body["max_tokens"], broken=body["prompt"] == "break"))

    async def pieces(count: int, broken: bool) -> AsyncIterator[str]:
        for i in range(count):
            reason = "length" if i == count - 1 and not broken else None
            yield f"data: {json.dumps({'choices': [{'text': ' word', 'finish_reason': reason}]})}\n\n"
        if not broken:
            yield "data: [DONE]\n\n"

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "modest"}]})

    app = Starlette(
        routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/v1/models", models)]
    )
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.should_exit = True
        await task


def test_a_server_without_usage() -> None:
    async def run() -> tuple[list[str], list[Record]]:
        async with modest_server() as url:
            target = commands.HTTPTarget(url)
            await target.connect()
            records = []
            for prompt in ("three little words", "fail", "break"):
                records.append(Record("all", 0, 0.0))
                await target.ask([Message("user", prompt)], 4, records[-1], Clock())
            await target.close()
            return target.notes, records

    notes, (good, failed, broken) = asyncio.run(run())
    assert [note.rsplit(" ", 1)[1] for note in notes] == ["stream_options", "ignore_eos"]
    assert good.error is None
    assert (good.output_tokens, good.prompt_tokens, good.counted_by) == (4, 3, "chunks")
    assert good.cached_tokens is None
    assert failed.error == "500 no"
    assert broken.error == "the stream ended without a finish reason"


def test_an_unreachable_server_is_one_clear_message() -> None:
    command = [sys.executable, "-m", "plait", "bench", "serve", "--base-url", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "http://127.0.0.1:9/v1 cannot be reached" in ended.stderr


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompts": "tokens"}, "--vocab-size"),
        ({"prompts": "tokens", "endpoint": "chat"}, "chat takes text alone"),
        ({"prompts": "poems"}, "text or tokens"),
        ({"extra_body": "["}, "--extra-body"),
        ({"endpoint": "embeddings"}, "completions, chat"),
        ({"model": "nobody"}, "refuses a plain request"),
    ],
)
def test_wrong_settings(server: LiveServer, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measured(server, traffic(), **fields)
    assert issubclass(TargetError, ValueError)


def test_memory_of_a_process_tree() -> None:
    assert os.getpid() in process_tree(os.getpid())
    assert pss_bytes([os.getpid()]) > 10 * 2**20
    assert process_tree(2**30) == []


# -- kernels ------------------------------------------------------------------------------------------


STEPS = ("decode, 1 x 512 tokens", "decode, 8 x 512 tokens", "prefill, 512 tokens")


@pytest.mark.parametrize(("backend", "weights"), [("reference", ["float32"]), ("auto", ["bfloat16", "int4"])])
def test_kernels_against_ceilings(model: Path, tmp_path: Path, backend: str, weights: list[str]) -> None:
    from rich.console import Console

    from plait.bench.kernels import bench_kernels
    from plait.bench.report import write_html

    with open(os.devnull, "w") as nowhere:
        groups = ["delta", "rows", "sampling", "step"]
        document = bench_kernels(
            str(model), backend, groups, 1, 0.0, 2, weights, Console(file=nowhere, width=160)
        )
    assert {c["unit"] for c in document["ceilings"]} == {"GB/s", "GFLOP/s"}
    assert all(c["value"] > 0 for c in document["ceilings"])
    rows = {(row["kernel"], row["case"]): row for row in document["kernels"]}
    share = rows["gated delta", "prefill, 1 x 512 tokens"]["share"]
    assert 0 < share["low"] <= share["ratio"] <= share["high"]
    assert share["ratio"] < 1.5
    assert rows["rms_norm", "M=64"]["share"] is None
    names = [f"{w} {kind}" for w in weights for kind in STEPS]
    assert [step["name"] for step in document["steps"]] == names
    for step in document["steps"]:
        parts = step["gemm"] + step["attention"] + step["recurrence"] + step["rest"]
        assert parts == pytest.approx(step["seconds"])
        assert min(step["gemm"], step["attention"], step["recurrence"], step["rest"]) > 0
    write_html(document, tmp_path / "kernels.html")
    assert "share of ceiling" in (tmp_path / "kernels.html").read_text()
