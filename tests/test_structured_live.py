"""Structured output over `plait serve`, by the clients that people have, with a model that thinks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest
from live import LiveServer
from thinking import thinking_model, tokenizer

TOKENS = tokenizer()
BIAS = {str(TOKENS.encode(text)[0]): 4.0 for text in ('"', "}", "]")} | {str(TOKENS.encode("\n")[0]): 2.0}
THINKING = {"thinking_token_budget": 8}
USER: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STRICT: Any = {"type": "function", "function": TOOL["function"] | {"strict": True}}


class Report(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    days: int
    sky: Literal["clear", "grey"]
    hours: list[bool] = pydantic.Field(max_length=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(thinking_model(tmp_path_factory.mktemp("thinking")), "--max-model-len", "4096")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def asked(**fields: Any) -> Any:
    model = {"messages": USER, "temperature": 1.0, "max_tokens": 1500, "seed": 5}
    return model | {"logit_bias": BIAS, "extra_body": THINKING} | fields


@pytest.fixture(scope="module")
def name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_pydantic_model_of_the_sdk(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.parse(**asked(model=name, response_format=Report))
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Report)
    shown: Any = choice.message
    assert shown.reasoning  # it thought first, freely
    answered = client.responses.parse(
        model=name, input=USER, text_format=Report, max_output_tokens=2500, temperature=1.0,
        extra_body={"thinking_token_budget": 8},
    )  # fmt: skip
    assert answered.status == "completed"
    assert isinstance(answered.output_parsed, Report)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [STRICT]},
        {"tools": [STRICT], "response_format": {"type": "json_object"}},
    ],
    ids=["object", "schema", "required", "strict", "strict or object"],
)
def test_a_stream_equals_the_whole(client: openai.OpenAI, name: str, fields: dict[str, Any]) -> None:
    given = asked(model=name, **fields)
    whole = client.chat.completions.create(**given).choices[0]
    content, reasoning, calls = "", "", {}
    for chunk in client.chat.completions.create(**given, stream=True):
        delta: Any = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or []:
            calls[call.index] = calls.get(call.index, "") + call.function.arguments
    message: Any = whole.message
    assert content == (message.content or "")
    assert reasoning == (message.reasoning or "")
    assert list(calls.values()) == [call.function.arguments for call in message.tool_calls or []]
    if "tools" not in fields:
        value = json.loads(content)
        jsonschema.validate(value, PARAMETERS if fields["response_format"]["type"] != "json_object" else {})
        assert isinstance(value, dict)
    assert bool(calls) == (whole.finish_reason == "tool_calls")
    for arguments in calls.values():
        jsonschema.validate(json.loads(arguments), PARAMETERS)
    assert calls or fields.get("tool_choice") != "required"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be_made_holds(client: openai.OpenAI, name: str, choice: Any) -> None:
    for seed in range(4):
        given = asked(model=name, tools=[TOOL], tool_choice=choice, seed=seed, parallel_tool_calls=False)
        [answer] = client.chat.completions.create(**given).choices
        [call] = answer.message.tool_calls
        assert call.function.name == "get_weather"
        assert answer.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_an_anthropic_tool_that_must_be_used(server: LiveServer, name: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    message = client.messages.create(
        model=name, max_tokens=400, messages=USER, tools=[{"name": "plan", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "plan", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert block.type == "tool_use"
    assert type(block.input["days"]) is int


def structured(server: LiveServer, **form: Any) -> str:
    body = {"prompt": "x", "max_tokens": 200, "structured_outputs": form, "temperature": 1, "seed": 1}
    response = httpx.post(server.url + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


def test_structured_outputs_of_vllm(server: LiveServer) -> None:
    assert re.fullmatch("[a-c]{2}-[0-9]{3}", structured(server, regex="[a-c]{2}-[0-9]{3}"))
    assert structured(server, choice=["left", "right"]) in ("left", "right")
    assert re.fullmatch("ab{1,9}", structured(server, grammar='root ::= "a" "b"{1,9}'))
    assert re.fullmatch("x[yz]+", structured(server, grammar='start: "x" /[yz]{1,5}/'))
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
    assert isinstance(json.loads(structured(server, json=schema)), list)
    assert isinstance(json.loads(structured(server, json=json.dumps(schema))), list)


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat/completions", {"response_format": {"type": "xml"}}, "'json_schema'"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "json_schema must be an object"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            'Unimplemented keys: ["not"]',
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "unknown field 'x'",
        ),
        ("chat/completions", {"structured_outputs": {"regex": "("}}, "unclosed group"),
        ("chat/completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "choice and regex"),
        ("chat/completions", {"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not served"),
        ("chat/completions", {"structured_outputs": {"choice": []}}, "choice is a list"),
        ("chat/completions", {"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
        ("chat/completions", {"structured_outputs": {"json": "{"}}, "no JSON"),
        (
            "chat/completions",
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "send one of them",
        ),
        (
            "chat/completions",
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL]},
            "cannot stand beside tools",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True,
             "parameters": {"type": "object", "properties": {"a": {"not": {}, "type": "integer"}}}}}]},
            "Unimplemented",
        ),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "Invalid type"),
        ("responses", {"text": {"format": {"type": "json_schema", "x": 1}}}, "unknown field 'x'"),
        ("completions", {"structured_outputs": {"json": {"uniqueItems": True}}}, "uniqueItems"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_gets_a_400(
    server: LiveServer, path: str, fields: dict[str, Any], words: str
) -> None:
    prompt = {
        "chat/completions": {"messages": USER},
        "responses": {"input": "x"},
        "completions": {"prompt": "x"},
    }
    response = httpx.post(f"{server.url}/v1/{path}", json=prompt[path] | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"].split(".")[0] in fields


def test_many_at_once(server: LiveServer) -> None:
    """Grammars of their own, all compiled beside the steps of the others."""
    patterns = [f"[a-{chr(98 + i)}]{{1,{5 + i}}}" for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda pattern: structured(server, regex=pattern), patterns))
    assert all(re.fullmatch(pattern, text) for pattern, text in zip(patterns, texts, strict=True))
