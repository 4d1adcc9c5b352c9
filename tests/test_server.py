"""The server's own work: what is accepted, what is refused, and the shapes of answers.

An engine that plays a script stands behind it; `test_server_live.py` runs the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted import HELLO, ScriptedEngine, asked_of_engine, chat, completion, events, post, serve

from plait.server import ServerSettings, create_app
from plait.server.sse import merged

FUNCTION = {"type": "function", "function": {"name": "f"}}

# -- whole answers -----------------------------------------------------------------------------------


def test_chat_answer() -> None:
    body = chat().json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hé!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt_tokens = len("<user>hello<assistant>")
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_chat_logprobs_carry_bytes() -> None:
    content = chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[72], [0xC3], [0xA9], [33]]
    assert content[0]["token"] == "H"
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["H", "A"]
    assert chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_answer_with_logprobs() -> None:
    [choice] = completion(logprobs=3).json()["choices"]
    assert choice["text"] == "Hé!"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"H": -0.5, "A": -2.0, "B": -9999.0}  # JSON has no infinity


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["a", "b"], [[97], [98]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_forms_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        response = await client.post("/v1/completions", json={"prompt": prompt, "n": 2})
        body = response.json()
        assert [p["prompt_token_ids"] for p, _, _ in engine.asked] == expected
        assert [c["index"] for c in body["choices"]] == list(range(2 * len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert body["usage"]["completion_tokens"] == 4 * 2 * len(expected)

    serve(use)


def test_echo() -> None:
    assert completion(echo=True).json()["choices"][0]["text"] == "abHé!"
    assert completion(echo=True, prompt=[97, 98]).json()["choices"][0]["text"] == "abHé!"
    scored = completion(echo=True, logprobs=1, max_tokens=0).json()
    [choice] = scored["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert scored["usage"]["completion_tokens"] == 0
    assert completion(echo=True, logprobs=1).json()["choices"][0]["logprobs"]["tokens"][:3] == ["a", "b", "H"]


def test_prompt_logprobs_and_token_ids() -> None:
    body = chat(prompt_logprobs=1, return_token_ids=True).json()
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1] == {"117": {"logprob": -1.0, "rank": 1, "decoded_token": "u"}}
    assert bytes(body["prompt_token_ids"]) == b"<user>hello<assistant>"
    assert bytes(body["choices"][0]["token_ids"]).decode() == "Hé!"


# -- streams -----------------------------------------------------------------------------------------


def test_chat_stream() -> None:
    chunks = events(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "Hé!"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "stop"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_stream_with_n_and_running_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(chat(stream=True, n=2, stream_options=options))
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "Hé!", 1: "Hé!"}
    counts = [c["usage"]["completion_tokens"] for c in chunks if c["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_completion_stream_of_several_prompts() -> None:
    chunks = events(completion(prompt=["a", "b"], stream=True, echo=True, logprobs=None))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "aHé!", 1: "bHé!"}


def test_stream_logprobs_equal_those_of_the_whole() -> None:
    whole = completion(logprobs=2).json()["choices"][0]["logprobs"]
    pieces = [c["choices"][0]["logprobs"] for c in events(completion(logprobs=2, stream=True))]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == whole[name]


# -- parameters --------------------------------------------------------------------------------------


def test_defaults_come_from_the_model_and_requests_win() -> None:
    _, params, _ = asked_of_engine("/v1/chat/completions", {"messages": HELLO})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, None)
    _, params, _ = asked_of_engine("/v1/completions", {"prompt": "a", "temperature": 0, "top_p": None})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.9, 16)


def test_fields_reach_the_engine() -> None:
    given = {
        "n": 2, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "seed": 7, "stop": ["x"], "stop_token_ids": [9], "min_tokens": 2,
        "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    more = {
        "max_tokens": 5,
        "max_completion_tokens": 9,
        "logit_bias": {"65": 3},
        "priority": -1,
        "cache_salt": "s",
    }
    body = {"messages": HELLO} | given | more
    _, params, keywords = asked_of_engine(
        "/v1/chat/completions", body, settings=ServerSettings(priorities=True)
    )
    shown = {name: getattr(params, name) for name in given} | {"stop": list(params.stop_strings)}
    assert shown | {"stop_token_ids": list(shown["stop_token_ids"])} == given
    assert params.max_tokens == 9
    assert params.logit_bias == {65: 3.0}
    assert (keywords["priority"], keywords["cache_salt"]) == (-1, "s")


def test_chat_template_kwargs() -> None:
    settings = ServerSettings(default_chat_template_kwargs={"mood": "calm"})

    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        await client.post("/v1/chat/completions", json={"messages": HELLO})
        more = {"chat_template_kwargs": {"mood": "wild"}, "add_generation_prompt": False}
        await client.post("/v1/chat/completions", json={"messages": HELLO} | more)
        texts = [bytes(p["prompt_token_ids"]).decode() for p, _, _ in engine.asked]
        assert texts == ["<user>hello<assistant>calm", "<user>hellowild"]

    serve(use, settings=settings)


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "function must be an object"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only functions are served"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "already"),
        ({"tools": [FUNCTION]}, "tools", "--tool-call-parser"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools", "strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools", "'x'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "none of tools",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort", "no such setting"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object' and 'json_schema'"),
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
        ({"temperature": -1}, "temperature", "from 0 to 100"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"n": 0}, "n", "1 to 128"),
        ({"stop": ["a", 3]}, "stop", "string"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs", "from 0 to"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ({"messages": [{"content": "no role"}]}, "messages", "role"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages", "function_call"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "whole"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"store": True}, "store", "not served"),
        ({"priority": 1}, "priority", "--scheduling-policy"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    response = chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"functions": None, "whatever": None},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"parallel_tool_calls": True, "modalities": ["text"], "length_penalty": 1.0},
    ],
)
def test_values_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"logprobs": 1000}, "logprobs"),
    ],
)
def test_completion_refused_by_name(fields: dict[str, Any], param: str) -> None:
    response = completion(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"messages": [', "not valid JSON"),
        (b"[1]", "JSON object"),
        (b"", "JSON object"),
        (b"7", "JSON object"),
    ],
)
def test_malformed_body(content: bytes, words: str) -> None:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await client.post("/v1/chat/completions", content=content, headers=headers)

    response = serve(use)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 10**30},
        {"top_k": 10**30},
        {"priority": 10**30},
        {"priority": -(2**63) - 1},
        {"min_tokens": 2**40},
        {"stop": "\ud800"},
        {"cache_salt": "\ud800"},
        {"prompt": "\ud800"},
        {"\ud800": 1},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"1": 1e39}},
        {"temperature": "NaN"},
        {"stop_token_ids": [2**40]},
        {"seed": 2**70},
    ],
    ids=lambda body: next(iter(body)).encode("utf-8", "replace").decode(),
)
def test_values_out_of_all_bounds_are_the_clients_fault(body: dict[str, Any]) -> None:
    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        content = json.dumps({"prompt": "hello", **body})
        response = await client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]

    serve(use)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "\ud800", "content": "x"}]},
        {"chat_template_kwargs": {"x": "\ud800"}},
    ],
)
def test_halves_of_surrogate_pairs_are_refused(fields: dict[str, Any]) -> None:
    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        content = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields})
        response = await client.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert "surrogate" in response.json()["error"]["message"]

    serve(use)


def test_a_template_variable_may_have_any_name() -> None:
    assert chat(chat_template_kwargs={"self": 1, "template": 2}).status_code == 200


def test_body_without_content_type_is_told_so() -> None:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> httpx.Response:
        return await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})

    assert "Content-Type: application/json" in serve(use).json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_engine_refusal_is_a_400_with_its_arithmetic(stream: bool) -> None:
    response = completion(prompt="x" * 101, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "101 prompt tokens, but max_model_len is 100"


def test_other_model_and_other_path() -> None:
    response = chat(model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    response = post("/v1/nothing", {})
    assert response.status_code == 404
    assert "/v1/nothing" in response.json()["error"]["message"]


def test_without_tokenizer_token_ids_work_and_text_does_not() -> None:
    def bare() -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.tokenizer = engine.chat_template = None
        return engine

    assert post("/v1/completions", {"prompt": [1, 2], "logprobs": 1}, engine=bare).status_code == 200
    response = post("/v1/completions", {"prompt": "ab"}, engine=bare)
    assert response.status_code == 400
    assert "token ids" in response.json()["error"]["message"]


def test_api_key_guards_v1_only() -> None:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> list[int]:
        right, wrong = {"authorization": "Bearer k"}, {"authorization": "Bearer x"}
        responses = [await client.get("/v1/models", headers=headers) for headers in (right, wrong, {})] + [
            await client.get("/health")
        ]
        return [r.status_code for r in responses]

    assert serve(use, settings=ServerSettings(api_key="k")) == [200, 401, 401, 200]


# -- hang-ups and a dead engine ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_hang_up_closes_the_engine_stream(stream: bool) -> None:
    async def run() -> None:
        engine = ScriptedEngine(hang_after=1)
        app = create_app(engine)  # type: ignore[arg-type]
        body = json.dumps({"prompt": "ab", "stream": stream}).encode()
        hung_up = asyncio.Event()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json"), (b"host", b"plait")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
        serving = asyncio.create_task(app(scope, receive, send))
        while not engine.open:
            await asyncio.sleep(0.001)
        hung_up.set()
        await asyncio.wait_for(serving, 1)
        assert engine.open == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_engine_death_ends_waiting_requests(stream: bool) -> None:
    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> httpx.Response:
        waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": stream}))
        while not engine.open:
            await asyncio.sleep(0.001)
        assert (await client.get("/health")).status_code == 200
        engine.dead.set()
        response = await waiting
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        assert "plait:engine_up" in (await client.get("/metrics")).text
        return response

    response = serve(use, engine=lambda: ScriptedEngine(hang_after=1))
    if stream:
        last = response.text.split("\n\n")[-2]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 503
        error = response.json()["error"]
    assert error["code"] == "engine_dead"
    assert "exit code -9" in error["message"]


def test_operations() -> None:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> None:
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 100)
        assert (await client.get("/v1/models/tiny")).json() == model
        assert (await client.get("/ping")).status_code == 200
        assert "version" in (await client.get("/version")).json()
        await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        page = (await client.get("/metrics")).text
        for line in (
            'vllm:num_requests_running{model_name="tiny"} 1.0',
            'vllm:kv_cache_usage_perc{model_name="tiny"} 0.1',
            'vllm:prefix_cache_hits_total{model_name="tiny"} 20.0',
            'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 4.0',
            'plait:pages{model_name="tiny",state="cached"} 2.0',
            'plait:states{model_name="tiny",state="cached"} 3.0',
            'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
            'vllm:inter_token_latency_seconds_count{model_name="tiny"} 3.0',
            'plait:engine_up{model_name="tiny"} 1.0',
        ):
            assert line in page

    serve(use)


def test_merged_streams_close_together() -> None:
    closed = []

    async def source(name: str, fails: bool) -> AsyncIterator[str]:
        try:
            yield name
            if fails:
                raise RuntimeError(name)
            await asyncio.sleep(60)
        finally:
            closed.append(name)

    async def run() -> None:
        with pytest.raises(RuntimeError, match="b"):
            async for _ in merged([source("a", False), source("b", True)]):
                pass
        assert sorted(closed) == ["a", "b"]

    asyncio.run(run())
