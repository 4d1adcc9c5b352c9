"""`plait serve` with a real model, asked by the clients that people use."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from live import LiveServer, alive, until

STORY = "Once upon a time, in a village by the sea, there lived"
LONG_ANSWER = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    server = LiveServer("--served-model-name", "smol", "--max-model-len", "2048")
    yield server
    assert server.stop() == 0
    assert not alive(server.engine_pid)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Name three colours."}]
    given = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**given | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "smol", "prompt": STORY, "temperature": 0, "max_tokens": 16}
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
    more = {"extra_body": {"return_token_ids": True}}
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
    shown = [t for t in content if t.token not in ("<|im_end|>",)]
    assert b"".join(bytes(t.bytes) for t in shown).decode() == choice.message.content
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
    assert scored.text == STORY
    assert "".join(scored.logprobs.tokens) == STORY
    assert scored.logprobs.token_logprobs[0] is None
    assert all(p <= 0 for p in scored.logprobs.token_logprobs[1:])


def test_stop_string_across_tokens(client: openai.OpenAI) -> None:
    free = complete(client, logprobs=0, max_tokens=24).choices[0]
    tokens = free.logprobs.tokens
    cut = next(i for i in range(6, 20) if len(tokens[i]) > 2 and len(tokens[i + 1]) > 2)
    stop = tokens[cut][-2:] + tokens[cut + 1][:2]
    expected = free.text[: free.text.index(stop)]
    [whole] = complete(client, stop=stop, max_tokens=24).choices
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (expected, "stop", stop)
    pieces = list(complete(client, stop=[stop], max_tokens=24, stream=True))
    assert "".join(c.choices[0].text for c in pieces) == expected


def test_errors(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        complete(client, prompt="word " * 3000)
    with pytest.raises(openai.BadRequestError, match="tools is not served"):
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="smol"):
        ask(client, model="other")
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[1, 10**7])
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[-1])
    assert httpx.get(server.url + "/health").status_code == 200


def test_many_at_once(client: openai.OpenAI) -> None:
    prompts = [f"{i} is a number, and" for i in range(12)]
    alone = [complete(client, prompt=p).choices[0].text for p in prompts]
    with ThreadPoolExecutor(12) as pool:
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
            assert next(response.iter_lines()).startswith("data: ")
            assert not idle()
    else:
        with pytest.raises(httpx.ReadTimeout):  # the client gives up; the answer takes longer
            httpx.post(server.url + "/v1/completions", json=body, timeout=1.0)
    assert until(idle, 5)


def test_load_shows_in_metrics(server: LiveServer, client: openai.OpenAI) -> None:
    before = server.metric("vllm:generation_tokens_total")
    complete(client, max_tokens=10, extra_body={"ignore_eos": True})
    assert server.metric("vllm:generation_tokens_total") == before + 10
    pages = [server.metric(f'plait:pages{{state="{state}"}}') for state in ("free", "cached", "used")]
    assert all(number >= 0 for number in pages)
    assert pages[1] > 0


def test_engine_death_is_told_at_once() -> None:
    server = LiveServer("--max-model-len", "2048")
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
    finally:
        assert server.stop() == 0


def test_sigterm_lets_running_requests_end() -> None:
    server = LiveServer("--max-model-len", "2048")
    body = LONG_ANSWER | {"stream": True, "max_tokens": 24}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(20) == 0
    assert not alive(server.engine_pid)
