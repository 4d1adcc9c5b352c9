"""LiteLLM as a proxy in front of plait: what clients of both worlds get through it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from answering import GREETING, Answering
from environments import environment
from live import until
from sockets import listening
from thinking import WEATHER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KEY = f"sk-{secrets.token_hex(16)}"
"""The proxy does not start without one."""
ARGUMENTS = {"city": "São Paulo", "days": 3}
HELLO: Any = [{"role": "user", "content": "Say hello."}]
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]
ANTHROPIC_TOOL: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The proxy's address. "tiny" goes on to the chat API, "tiny-messages" to the messages API."""
    commands = environment("litellm[proxy]>=1.80")
    folder = tmp_path_factory.mktemp("litellm")
    with listening(Answering()) as url, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        parameters = {
            "tiny": {"model": "hosted_vllm/tiny", "api_base": url + "/v1", "api_key": "none"},
            "tiny-messages": {"model": "anthropic/tiny", "api_base": url, "api_key": "none"},
        }
        models = [{"model_name": name, "litellm_params": given} for name, given in parameters.items()]
        (folder / "config.yaml").write_text(json.dumps({"model_list": models}))  # JSON is YAML
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [commands / "litellm", "--config", "config.yaml", "--port", str(port), "--host", "127.0.0.1"],
                cwd=folder, stdout=log, stderr=log, env={**os.environ, "LITELLM_MASTER_KEY": KEY},
            )  # fmt: skip
        try:
            address = f"http://127.0.0.1:{port}"
            until(lambda: _alive(address) or process.poll() is not None, 240)
            assert _alive(address), (folder / "log").read_text()[-3000:]
            yield address
        finally:
            process.terminate()
            process.wait(30)


def _alive(address: str) -> bool:
    try:
        return httpx.get(address + "/health/liveliness", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def client(proxy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=proxy + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO)
    [choice] = answer.choices
    message: Any = choice.message
    assert message.content == GREETING
    assert message.reasoning_content == "I should greet."
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 30


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    deltas: list[Any] = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == GREETING
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "I should greet."
    assert sum(bool(d.content) for d in deltas) > 5


@pytest.mark.parametrize("stream", [True, False])
def test_tools(client: openai.OpenAI, stream: bool) -> None:
    given: Any = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER]}
    if stream:
        with client.chat.completions.stream(**given) as events:
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**given)
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert json.loads(call.function.arguments) == ARGUMENTS
    given["messages"] = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    given["messages"][1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
    assert client.chat.completions.create(**given).choices[0].message.content == "It will be sunny."


def test_errors_come_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)


@pytest.mark.parametrize("model", ["tiny", "tiny-messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_messages(proxy: str, model: str, stream: bool) -> None:
    given: Any = {"model": model, "max_tokens": 2000, "messages": QUESTION, "tools": [ANTHROPIC_TOOL]}
    with anthropic.Anthropic(base_url=proxy, api_key=KEY, max_retries=0) as client:
        if stream:
            with client.messages.stream(**given) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**given)
        [call] = [block for block in message.content if block.type == "tool_use"]
        assert call.input == ARGUMENTS
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        said = [block.model_dump(exclude_none=True) for block in message.content if block.type != "thinking"]
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        answer: Any = client.messages.create(**given | {"messages": QUESTION + more})
    assert [block.text for block in answer.content if block.type == "text"] == ["It will be sunny."]
