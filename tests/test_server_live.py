"""`plait serve` as it runs, with a small hybrid model, asked by the clients that people use."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live import LiveServer, alive, small_model, until

STORY = "Once upon a time, in a village by the sea, there lived"
LONG_ANSWER = {"prompt": STORY, "max_tokens": 3500, "ignore_eos": True, "temperature": 0}
QUESTION = [{"role": "user", "content": "Which three colours does a traffic light have, from top to bottom?"}]
WHOLE = {"ignore_eos": True, "skip_special_tokens": False}
"""Random weights may end at any token, or speak in special ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    server = LiveServer(model, "--served-model-name", "small", "--max-model-len", "4000")
    yield server
    assert server.stop() == 0
    assert not alive(server.engine_pid)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "small", "messages": QUESTION, "temperature": 0, "max_tokens": 24, "extra_body": WHOLE}
    return client.chat.completions.create(**given | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "small", "prompt": STORY, "temperature": 0, "max_tokens": 16, "extra_body": WHOLE}
    return client.completions.create(**given | fields)


def test_stages_and_decisions_are_printed(server: LiveServer) -> None:
    assert sum(" s  " in line for line in server.lines) >= 2
    assert any(line.startswith("  • ") for line in server.lines)


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    whole = ask(client)
    pieces = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = pieces[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # the prompt was seen before


def test_completion_streams(client: openai.OpenAI) -> None:
    whole = complete(client)
    assert "".join(c.choices[0].text for c in complete(client, stream=True)) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16


def test_token_ids_equal_text(client: openai.OpenAI) -> None:
    more = {"extra_body": WHOLE | {"return_token_ids": True}}
    [choice] = complete(client, **more).choices
    both = complete(client, prompt=[choice.prompt_token_ids] * 2, **more)
    assert [c.text for c in both.choices] == [choice.text] * 2
    assert [c.token_ids for c in both.choices] == [choice.token_ids] * 2


def test_n_answers_are_reproducible_and_differ(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = ask(client, n=3, temperature=1.0, seed=11)
        return [c.message.content for c in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    assert ask(client, n=1, temperature=1.0, seed=11).choices[0].message.content == first[0]


def test_logprobs(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode(errors="replace") == choice.message.content
    for token in content:
        best = token.top_logprobs
        assert len(best) == 3
        assert [t.logprob for t in best] == sorted((t.logprob for t in best), reverse=True)
        assert (best[0].token, best[0].logprob) == (token.token, token.logprob)  # greedy
        assert token.logprob <= 0
    streamed = [
        t
        for c in ask(client, logprobs=True, top_logprobs=3, stream=True)
        for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])
    ]
    assert [(t.token, t.logprob) for t in streamed] == [(t.token, t.logprob) for t in content]


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    scored = complete(client, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert scored.text == STORY == "".join(scored.logprobs.tokens)
    assert scored.logprobs.token_logprobs[0] is None
    assert all(p <= 0 for p in scored.logprobs.token_logprobs[1:])


def test_stop_string_across_tokens(client: openai.OpenAI) -> None:
    free = complete(client, logprobs=0, max_tokens=40).choices[0]
    pairs = list(itertools.pairwise(free.logprobs.tokens))[4:]
    stop = next(a[-1] + b[0] for a, b in pairs if (a + b).isascii())
    expected = free.text[: free.text.index(stop)]
    [whole] = complete(client, stop=stop, max_tokens=40).choices
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (expected, "stop", stop)
    pieces = list(complete(client, stop=[stop], max_tokens=40, stream=True))
    assert "".join(c.choices[0].text for c in pieces) == expected


def test_errors(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="4000"):
        complete(client, prompt=[5] * 4001)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="small"):
        ask(client, model="other")
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[1, 10**7])
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[-1])
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        complete(client, logit_bias={"100000": 1})
    assert httpx.get(server.url + "/health").status_code == 200


def test_many_at_once(client: openai.OpenAI) -> None:
    prompts = [f"{i} is a number, and" for i in range(8)]
    alone = [complete(client, prompt=p).choices[0].text for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: complete(client, prompt=p).choices[0].text, prompts))
    assert together == alone


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_frees_memory(server: LiveServer, stream: bool) -> None:
    def idle() -> bool:
        return (
            server.metric("vllm:num_requests_running") == 0
            and server.metric('plait:pages{state="used"}') == 0
        )

    assert until(idle)
    body = LONG_ANSWER | {"stream": stream}
    if stream:
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # httpx hangs up when this iterator is collected
            assert next(lines).startswith("data: ")
            assert not idle()
    else:
        with pytest.raises(httpx.ReadTimeout):  # the client gives up; the answer takes longer
            httpx.post(server.url + "/v1/completions", json=body, timeout=1.0)
    assert until(idle, 5)


def test_load_shows_in_metrics(server: LiveServer, client: openai.OpenAI) -> None:
    before = server.metric("vllm:generation_tokens_total")
    complete(client, max_tokens=10)
    assert server.metric("vllm:generation_tokens_total") == before + 10
    pages = [server.metric(f'plait:pages{{state="{state}"}}') for state in ("free", "cached", "used")]
    assert all(number >= 0 for number in pages)
    assert pages[1] > 0
    assert server.metric('plait:states{state="cached"}') > 0


def test_engine_death_is_told_at_once(model: Path) -> None:
    server = LiveServer(model)
    ends: list[tuple[float, httpx.Response]] = []

    def wait(stream: bool) -> None:
        response = httpx.post(
            server.url + "/v1/completions", json=LONG_ANSWER | {"stream": stream}, timeout=60
        )
        ends.append((time.monotonic(), response))

    threads = [threading.Thread(target=wait, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    try:
        assert until(lambda: server.metric("vllm:num_requests_running") == 2)
        time.sleep(0.5)  # let the stream begin
        killed = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        for thread in threads:
            thread.join(5)
        assert len(ends) == 2
        assert max(at for at, _ in ends) - killed < 1.0
        by_kind = {r.headers["content-type"].split(";")[0]: r for _, r in ends}
        assert by_kind["application/json"].status_code == 503
        last = by_kind["text/event-stream"].text.strip().rsplit("data: ", 1)[1]
        assert json.loads(last)["error"]["code"] == "engine_dead"
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 503
        assert server.metric("plait:engine_up") == 0
        assert until(lambda: any("killed" in line for line in server.lines))
    finally:
        assert server.stop() == 0


def test_sigterm_lets_running_requests_end(model: Path) -> None:
    server = LiveServer(model)
    body = LONG_ANSWER | {"stream": True, "max_tokens": 30}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(20) == 0
    assert not alive(server.engine_pid)
