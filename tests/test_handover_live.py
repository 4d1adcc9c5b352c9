"""Hand-over between processes: two `plait serve`, a router of ten lines, and what happens when one dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, small_model, until

from plait import LLM, SamplingParams

PROMPT = "Once upon a time, in a village by the sea, there lived a keeper of the light. " * 6
FIELDS = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "logprobs": 2, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": PROMPT}]
FETCH_SECONDS = 4.0


def config(role: str) -> str:
    extra = {"lease_seconds": 60, "fetch_seconds": FETCH_SECONDS}
    given = {"kv_connector": "LoopbackConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return json.dumps(given)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


def start(model: Path, role: str) -> LiveServer:
    flags = ("--served-model-name", "small", "--max-model-len", "2000", "--cpu-threads", "1")
    return LiveServer(model, "--kv-transfer-config", config(role), *flags)


@pytest.fixture(scope="module")
def decoder(model: Path) -> Iterator[LiveServer]:
    server = start(model, "kv_consumer")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def prefiller(model: Path) -> Iterator[LiveServer]:
    server = start(model, "kv_producer")
    yield server
    assert server.stop() == 0


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def prefill(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a router sends to a prefiller, and what it gets for the decoder."""
    begin = {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip
    reply = ask(server, path, body | {"max_tokens": 1, "stream": False, "kv_transfer_params": begin})
    assert reply["usage"]["completion_tokens"] == 0
    params: dict[str, Any] = reply["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    return params


def choice(answer: Any) -> Any:
    return answer["choices"][0]


def test_two_processes_answer_as_one_does(decoder: LiveServer, prefiller: LiveServer) -> None:
    """Completions and chat, whole and streamed, and n answers of one prompt."""
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, **FIELDS}),
        ("/v1/chat/completions", {"messages": MESSAGES, **FIELDS, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": PROMPT + "And then", **FIELDS, "n": 3}),
        ("/v1/completions", {"prompt": [7], **FIELDS}),
    ):
        alone = ask(decoder, path, body | {"cache_salt": "alone"})
        params = prefill(prefiller, path, body)
        together = ask(decoder, path, body | {"kv_transfer_params": params})
        assert together["choices"] == alone["choices"]
    assert decoder.metric("plait:prompts_received_total") >= 3
    assert decoder.metric("plait:fetches_failed_total") == 0

    body = {"prompt": PROMPT + "Once more", **FIELDS}
    alone = ask(decoder, "/v1/completions", body | {"cache_salt": "alone"})
    params = prefill(prefiller, "/v1/completions", body)
    streamed = ""
    with httpx.stream(
        "POST",
        decoder.url + "/v1/completions",
        json=body | {"stream": True, "kv_transfer_params": params},
        timeout=60,
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["text"]
    assert streamed == choice(alone)["text"]
    for server in (prefiller, decoder):
        assert until(lambda server=server: server.metric('plait:pages{state="used"}') == 0)
    assert prefiller.metric('plait:leases_ended_total{reason="released"}') >= 4
    assert prefiller.metric("plait:leases") == 0


def test_a_stopped_prefiller(decoder: LiveServer, prefiller: LiveServer) -> None:
    """It says nothing, and its connection stands: the decoder's own deadline ends the wait."""
    body = {"prompt": PROMPT + "stopped", **FIELDS}
    alone = ask(decoder, "/v1/completions", body | {"cache_salt": "alone"})
    warm = {"prompt": PROMPT + "before", **FIELDS}
    ask(
        decoder, "/v1/completions", warm | {"kv_transfer_params": prefill(prefiller, "/v1/completions", warm)}
    )
    params = prefill(prefiller, "/v1/completions", body)
    os.kill(prefiller.engine_pid, signal.SIGSTOP)
    try:
        got = ask(decoder, "/v1/completions", body | {"kv_transfer_params": params})
    finally:
        os.kill(prefiller.engine_pid, signal.SIGCONT)
    assert choice(got) == choice(alone)
    assert until(lambda: prefiller.metric("plait:leases") == 0)  # the connection was given up
    assert until(lambda: decoder.metric('plait:quarantined{kind="page"}') == 0)


@pytest.mark.slow
def test_two_llms(model: Path) -> None:
    """Offline: prompts go from one LLM to another, and are answered as by the other alone."""
    common: dict[str, Any] = {"load_format": "dummy", "seed": 1, "max_model_len": 1000, "cpu_threads": 1}
    common |= {"kv_transfer_config": {"kv_connector": "LoopbackConnector"}, "enable_prefix_caching": False}
    prompts = [PROMPT, PROMPT + "And then", "x"]
    sampled = [SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True) for i in range(3)]
    with LLM(str(model), **common) as first, LLM(str(model), **common) as second:
        alone = second.generate(prompts, sampled)
        begun = first.generate(prompts, sampled, kv_transfer_params=[{"do_remote_decode": True}] * 3)
        assert all(not output.outputs[0].token_ids for output in begun)
        together = second.generate(prompts, sampled, kv_transfer_params=[o.kv_transfer_params for o in begun])
        assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_what_is_not_served(decoder: LiveServer, prefiller: LiveServer) -> None:
    def refusal(server: LiveServer, **body: Any) -> str:
        response = httpx.post(server.url + "/v1/completions", json={"prompt": "Hello there", **body})
        assert response.status_code == 400
        return str(response.json()["error"]["message"])

    begin = {"do_remote_decode": True}
    assert "kv_consumer" in refusal(decoder, kv_transfer_params=begin)
    assert "leave out stream" in refusal(prefiller, kv_transfer_params=begin, stream=True)
    assert "one by one" in refusal(prefiller, kv_transfer_params=begin, prompt=["a", "b"])
    assert "unknown field" in refusal(prefiller, kv_transfer_params={"do_magic": True})
    assert "another machine" in refusal(
        decoder,
        kv_transfer_params={
            "do_remote_prefill": True, "remote_engine_id": "x", "remote_request_id": "y",
            "remote_host": "192.0.2.7", "remote_port": 5, "remote_num_tokens": 1,
        },
    )  # fmt: skip


def test_a_killed_prefiller(model: Path, decoder: LiveServer) -> None:
    """Its prompt is computed by the decoder; what it shared is gone with it."""
    prefiller = start(model, "kv_producer")
    body = {"prompt": PROMPT + "killed", **FIELDS}
    alone = ask(decoder, "/v1/completions", body | {"cache_salt": "alone"})
    failed = decoder.metric("plait:fetches_failed_total")
    params = prefill(prefiller, "/v1/completions", body)
    os.kill(prefiller.engine_pid, signal.SIGKILL)
    prefiller.stop()
    got = ask(decoder, "/v1/completions", body | {"kv_transfer_params": params})
    assert choice(got) == choice(alone)
    assert decoder.metric("plait:fetches_failed_total") == failed + 1
    assert until(lambda: decoder.metric('plait:pages{state="used"}') == 0)


@pytest.mark.slow
def test_a_killed_decoder(model: Path, prefiller: LiveServer) -> None:
    """Prompts that it was to read return: those it held at once."""
    victim = start(model, "kv_consumer")
    body = {"prompt": PROMPT + "victim", **FIELDS, "max_tokens": 1500}
    params = prefill(prefiller, "/v1/completions", body)
    with httpx.stream(
        "POST",
        victim.url + "/v1/completions",
        json=body | {"stream": True, "kv_transfer_params": params},
        timeout=60,
    ) as response:
        assert next(response.iter_lines()).startswith("data: ")
        os.kill(victim.engine_pid, signal.SIGKILL)
    victim.stop()
    assert until(lambda: prefiller.metric("plait:leases") == 0)
