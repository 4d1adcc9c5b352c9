"""guidellm, a load generator that knows nothing of plait, completes a run against the server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environments import environment
from live import LiveServer
from thinking import thinking_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REQUESTS, STREAMS, TOKENS = 40, 4, 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    server = LiveServer(model, "--served-model-name", "tiny", "--max-model-len", "4000")
    yield server
    assert server.stop() == 0


def test_a_run_of_guidellm(server: LiveServer, tmp_path: Path) -> None:
    commands = environment("guidellm>=0.8", with_ours=True)
    questions = [{"prompt": f"Question {i}: which number comes next?"} for i in range(REQUESTS)]
    data, report = tmp_path / "data.json", tmp_path / "report.json"
    data.write_text(json.dumps(questions))
    backend: dict[str, Any] = {"kind": "openai_http", "target": server.url, "model": "tiny"}
    backend["extras"] = {"body": {"max_tokens": TOKENS, "ignore_eos": True}}
    command = [
        commands / "guidellm", "run", "--backend", json.dumps(backend),
        "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}",
        "--disable-console",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, **offline}, cwd=tmp_path
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == REQUESTS
    assert metrics["request_totals"]["errored"] == 0
    for name in ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms"):
        figures = metrics[name]["successful"]
        print(f"{name}: mean {figures['mean']:.2f}, p99 {figures['percentiles']['p99']:.2f}")
    assert metrics["output_token_count"]["successful"]["mean"] == TOKENS
