"""`plait serve` with a model that thinks, started with the flags that people bring from vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from live import LiveServer
from thinking import TEMPLATE, WEATHER, thinking_model, tokenizer

FLAGS = [
    "--max-model-len", "131072", "--gpu-memory-utilization", "0.85", "--enable-prefix-caching",
    "--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder",
    "--kv-cache-dtype", "fp8", "--calculate-kv-scales", "--max-num-seqs", "8",
    "--max-num-batched-tokens", "4096", "--served-model-name", "qwen3.5-35b",
]  # fmt: skip
NAME = "qwen3.5-35b"
USER: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    server = LiveServer(model, *FLAGS)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, max_tokens: int = 16, **fields: Any) -> Any:
    more = {"ignore_eos": True} | fields.pop("extra_body", {})
    given = {"model": NAME, "messages": USER, "temperature": 0, "max_tokens": max_tokens, "extra_body": more}
    return client.chat.completions.create(**given | fields)


def test_each_flag_is_answered_to(server: LiveServer) -> None:
    said = "\n".join(server.lines)
    for words in (
        "memory limit: ", "(0.85 of ", "--calculate-kv-scales has no effect: scales",
        "reasoning: qwen3 (as asked)", "tool calls: qwen3_coder (as asked)", "float8_e4m3fn", "131,072",
        "max_num_seqs: 8", "4096", "prefix cache: on",
    ):  # fmt: skip
        assert words in said, said


def test_the_model_says_what_it_can(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    shown: Any = model.model_dump()
    assert (shown["id"], shown["max_model_len"]) == (NAME, 131072)
    assert shown["family"] == "Qwen3_5ForCausalLM"
    assert shown["capabilities"]["reasoning"] == "qwen3"
    assert shown["capabilities"]["tools"] == "qwen3_coder"


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_eats_the_budget(client: openai.OpenAI, stream: bool) -> None:
    """What random weights say first is reasoning, for all of a short answer."""
    if stream:
        chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
        usage, choices = chunks[-1].usage, [c.choices[0] for c in chunks if c.choices]
        content = "".join(c.delta.content or "" for c in choices)
        reasoning = "".join(getattr(c.delta, "reasoning", None) or "" for c in choices)
        reason = choices[-1].finish_reason
    else:
        answer = ask(client)
        usage, choice = answer.usage, answer.choices[0]
        content, reasoning, reason = choice.message.content, choice.message.reasoning, choice.finish_reason
        assert content is None
    assert (reason, content or "") == ("length", "")
    assert reasoning
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 16


def test_a_stream_equals_the_whole(client: openai.OpenAI) -> None:
    more: Any = {"tools": [WEATHER], "max_tokens": 60, "extra_body": {"thinking_token_budget": 20}}
    whole = ask(client, **more)
    chunks = list(ask(client, stream=True, **more))
    for name in ("content", "reasoning", "reasoning_content"):
        pieces = [getattr(c.choices[0].delta, name, None) or "" for c in chunks if c.choices]
        assert "".join(pieces) == (getattr(whole.choices[0].message, name) or "")


@pytest.mark.parametrize("budget", [1, 5, 30])
def test_a_budget_closes_the_thinking_in_time(client: openai.OpenAI, budget: int) -> None:
    answer = ask(client, 80, extra_body={"thinking_token_budget": budget, "return_token_ids": True})
    assert answer.usage.completion_tokens_details.reasoning_tokens <= budget
    [choice] = answer.choices
    close = tokenizer().token_id("</think>")
    assert close in choice.token_ids[: budget + 1]
    assert choice.message.content


def test_thinking_can_be_turned_off(client: openai.OpenAI) -> None:
    off = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    assert off.choices[0].message.content


def test_tokens_and_back(server: LiveServer) -> None:
    def post(path: str, body: Any) -> Any:
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    made = post("/tokenize", {"prompt": "Hello <|im_start|> Bär", "return_token_strs": True})
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 131072
    assert post("/detokenize", {"tokens": made["tokens"]})["prompt"] == "Hello <|im_start|> Bär"
    chat = post("/tokenize", {"messages": USER, "tools": [WEATHER]})
    text = post("/detokenize", {"tokens": chat["tokens"]})["prompt"]
    assert text.startswith("<|im_start|>system\n# Tools")
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    for body in (
        {},
        {"prompt": "x", "messages": USER},
        {"messages": USER, "add_special_tokens": True},
        {"x": 1},
    ):
        assert httpx.post(server.url + "/tokenize", json=body).status_code == 400
    assert httpx.post(server.url + "/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_a_deadline_ends_the_answer(client: openai.OpenAI) -> None:
    answer = ask(client, 50_000, extra_body={"timeout": 1.0})
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("length", "deadline")
    assert 0 < answer.usage.completion_tokens < 50_000


def test_the_other_apis_reach_the_engine(server: LiveServer, client: openai.OpenAI) -> None:
    messages_client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    given: Any = {"model": NAME, "max_tokens": 40, "messages": USER, "tools": [
        {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    ]}  # fmt: skip
    first = messages_client.messages.create(**given, thinking={"type": "enabled", "budget_tokens": 10})
    assert first.content[0].type == "thinking"
    with messages_client.messages.stream(
        **given, thinking={"type": "enabled", "budget_tokens": 10}
    ) as stream:
        again = stream.get_final_message()
    assert (again.usage.cache_read_input_tokens or 0) > 0
    counted = messages_client.messages.count_tokens(model=NAME, messages=USER)
    assert counted.input_tokens > 10
    response = client.responses.create(model=NAME, input="Hello", max_output_tokens=20)
    assert response.status in ("incomplete", "completed")
    assert response.output
    events = list(client.responses.create(model=NAME, input="Hello", max_output_tokens=20, stream=True))
    assert events[-1].type in ("response.incomplete", "response.completed")


@pytest.mark.slow
def test_parsers_follow_from_a_template_file_or_are_off(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("<function=", "<f="))
    server = LiveServer(
        model, "--chat-template", str(file), "--reasoning-parser", "none", "--max-model-len", "2000",
        "--default-chat-template-kwargs", json.dumps({"enable_thinking": False}),
    )  # fmt: skip
    try:
        said = "\n".join(server.lines)
        assert "reasoning: not told apart (as asked; the chat template shows qwen3)" in said
        assert "tool calls: mistral (as the chat template shows)" in said
        assert "enable_thinking=False unless a request says otherwise" in said
        response = httpx.post(server.url + "/tokenize", json={"messages": USER})
        text = httpx.post(server.url + "/detokenize", json={"tokens": response.json()["tokens"]}).json()
        assert text["prompt"].endswith("</think>\n\n")
    finally:
        assert server.stop() == 0
