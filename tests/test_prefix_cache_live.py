"""`plait serve` with a prefix cache on disk, killed and started again; and the look into the cache."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, small_model, until

PROMPT = "One, two, three, four, five, six, seven: all good children go to heaven. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


def test_a_killed_server_starts_warm(model: Path, tmp_path: Path) -> None:
    flags = ("--prefix-cache-dir", str(tmp_path), "--debug-endpoints", "--api-key", "secret")
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(headers=headers) as client:
        server = LiveServer(model, *flags)
        first = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert first.status_code == 401
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 4}
        body |= {"logprobs": 2}

        def ask() -> dict[str, Any]:
            response = client.post(server.url + "/v1/completions", json=body, timeout=60)
            assert response.status_code == 200, response.text
            return response.json()

        cold = ask()
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        total = cold["usage"]["prompt_tokens"]
        wanted = total // 16
        assert until(lambda: server.metric('plait:tier_written_total{kind="page"}') >= wanted)
        assert until(lambda: server.metric('plait:tier_written_total{kind="snapshot"}') >= 1)
        os.kill(server.engine_pid, signal.SIGKILL)
        server.stop()

        server = LiveServer(model, *flags)
        assert any("prefix cache on disk" in line and "units kept" in line for line in server.lines)
        warm = ask()
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == (total - 1) // 16 * 16
        assert warm["choices"] == cold["choices"]
        assert server.metric('plait:tier_read_total{kind="snapshot"}') == 1

        assert httpx.get(server.url + "/debug/prefix-cache").status_code == 401
        found = client.get(server.url + "/debug/prefix-cache").json()["branches"]
        assert found[0]["text"].startswith("One, two, three")
        assert max(branch["end"] for branch in found) >= (total - 1) // 16 * 16
        assert any(branch["snapshot"] == "tail" for branch in found)
        text = client.get(server.url + "/debug/prefix-cache", params={"format": "text", "most": 1}).text
        assert text.startswith("0..")
        assert text.count("\n") == 1
        assert client.get(server.url + "/debug/prefix-cache", params={"most": 0}).status_code == 400
        assert server.stop() == 0


def test_debug_is_off_by_default() -> None:
    from scripted import serve

    async def use(client: httpx.AsyncClient, _: Any) -> int:
        return (await client.get("/debug/prefix-cache")).status_code

    assert serve(use) == 404
