"""Reasoning and tool calls through the chat API: shapes of whole answers and of streams, and what is refused.

A scripted engine says what a model would; parsers have their own tests.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, events, serve
from sockets import listening
from thinking import TEMPLATE, WEATHER

from plait.server import ServerSettings

HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "I should look.\n</think>\n\n"
CALL = (
    "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = {"city": "São Paulo", "days": 3}


def ask(answer: str, reason: str = "stop", server: ServerSettings | None = None, **fields: Any) -> Any:
    """The response, and the prompt that the engine saw."""

    async def use(client: httpx.AsyncClient, engine: ScriptedEngine) -> Any:
        body = json.dumps({"messages": HELLO} | fields)
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/chat/completions", content=body, headers=headers)
        prompt = engine.asked[0][0]["prompt_token_ids"] if engine.asked else []
        return response, bytes(prompt).decode()

    return serve(use, lambda: ScriptedEngine(answer, None, TEMPLATE, 10_000, reason), server)


def message(answer: str, **fields: Any) -> dict[str, Any]:
    response, _ = ask(answer, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def gathered(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream put together as clients do it."""
    text: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in text:
                text[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls[part["index"]] = {**part, "function": dict(part["function"])}
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {k: v or None for k, v in text.items()} | {"tool_calls": list(calls.values())}


def test_a_call() -> None:
    response, _ = ask(THOUGHT + CALL, tools=[WEATHER])
    body = response.json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    said = choice["message"]
    assert said["content"] == "Let me see."
    assert said["reasoning"] == said["reasoning_content"] == "I should look."
    [call] = said["tool_calls"]
    assert call["type"] == "function"
    assert re.fullmatch(r"call_[0-9a-f]{24}", call["id"])
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("I should look.\n")}


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_equals_the_whole(n: int) -> None:
    whole = message(THOUGHT + CALL + "\n" + CALL, tools=[WEATHER])
    response, _ = ask(
        THOUGHT + CALL + "\n" + CALL, tools=[WEATHER], stream=True, n=n,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = events(response)
    for index in range(n):
        mine = [c for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        streamed = gathered(mine)
        assert {k: streamed[k] for k in ("content", "reasoning")} == {
            k: whole[k] for k in ("content", "reasoning")
        }
        assert [c["function"] for c in streamed["tool_calls"]] == [c["function"] for c in whole["tool_calls"]]
        assert [c["choices"][0]["finish_reason"] for c in mine][-1] == "tool_calls"
    reasoning = chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == n * len("I should look.\n")


def test_arguments_stream_as_they_grow() -> None:
    response, _ = ask(THOUGHT + CALL, tools=[WEATHER], stream=True)
    grown = [
        part["function"]["arguments"]
        for chunk in events(response)
        for part in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(grown) > len("São Paulo")  # a chunk for each character of the city
    for so_far in itertools.accumulate(grown):
        assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(so_far)


def test_thinking_that_eats_the_budget() -> None:
    for stream in (False, True):
        response, _ = ask("I wonder whether", reason="length", stream=stream)
        if stream:
            chunks = events(response)
            said, reason = gathered(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            [choice] = response.json()["choices"]
            said, reason = choice["message"], choice["finish_reason"]
            usage = response.json()["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 16
        assert (said["content"], said["reasoning"], reason) == (None, "I wonder whether", "length")


def test_thinking_is_on_or_off_by_request_or_server() -> None:
    off = ServerSettings(default_chat_template_kwargs={"enable_thinking": False})
    assert ask("Hi.")[1].endswith("<think>\n")
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        response, prompt = ask("Hi.", **fields)
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert response.json()["choices"][0]["message"]["content"] == "Hi."
    response, prompt = ask("Hi.", server=off)
    assert prompt.endswith("</think>\n\n")
    assert response.json()["choices"][0]["message"]["reasoning"] is None
    prompt = ask("Hi.", server=off, chat_template_kwargs={"enable_thinking": True})[1]
    assert prompt.endswith("<think>\n")


def test_reasoning_may_be_left_out_of_the_answer() -> None:
    said = message(THOUGHT + "Hi.", include_reasoning=False)
    assert said == {"role": "assistant", "content": "Hi.", "refusal": None}
    chunks = events(ask(THOUGHT + "Hi.", include_reasoning=False, stream=True)[0])
    assert not any("reasoning" in c["choices"][0]["delta"] for c in chunks)


def test_parsers_can_be_turned_off() -> None:
    none = ServerSettings(reasoning_parser="none", tool_call_parser="none")
    assert message(THOUGHT + CALL, server=none)["content"] == THOUGHT + CALL
    response, _ = ask("x", server=none, tools=[WEATHER])
    assert response.status_code == 400
    with pytest.raises(ValueError, match=r"reasoning_parser='gpt'.*qwen3"):
        ServerSettings(reasoning_parser="gpt")


def test_tool_choice() -> None:
    _, prompt = ask("Hi.", tools=[WEATHER], tool_choice="none")
    assert "get_weather" not in prompt
    said = message(THOUGHT + CALL, tools=[WEATHER], tool_choice="none")
    assert said["content"] == CALL
    other = {"type": "function", "function": {"name": "now"}}
    rest = CALL.partition("<function=get_weather>\n")[2]
    named = {"type": "function", "function": {"name": "get_weather"}}
    forced = "<think>\n\n</think>\n\n<tool_call>\n<function="
    for choice, answer in ((named, rest), ("required", "get_weather>\n" + rest)):
        for stream in (False, True):
            response, prompt = ask(answer, tools=[WEATHER, other], tool_choice=choice, stream=stream)
            assert prompt.endswith(forced + ("get_weather>\n" if choice is named else ""))
            said = gathered(events(response)) if stream else response.json()["choices"][0]["message"]
            [call] = said["tool_calls"]
            assert call["function"]["name"] == "get_weather"
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
            assert said["content"] is None
    auto_off = ServerSettings(enable_auto_tool_choice=False)
    assert ask("x", server=auto_off, tools=[WEATHER])[0].status_code == 400
    assert ask(rest, server=auto_off, tools=[WEATHER], tool_choice=named)[0].status_code == 200


def test_parallel_calls_may_be_forbidden() -> None:
    both = CALL + "\n" + CALL.removeprefix("Let me see.\n\n")
    assert len(message(THOUGHT + both, tools=[WEATHER])["tool_calls"]) == 2
    assert len(message(THOUGHT + both, tools=[WEATHER], parallel_tool_calls=False)["tool_calls"]) == 1


def test_the_official_client_reads_it() -> None:
    with listening(ScriptedEngine(THOUGHT + CALL, None, TEMPLATE, 10_000)) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0)
        given: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
        whole = client.chat.completions.create(**given).choices[0]
        with client.chat.completions.stream(**given) as stream:
            grown = [event.arguments_delta for event in stream if "arguments.delta" in event.type]
            final = stream.get_final_completion().choices[0]
        for choice in (whole, final):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me see."
            assert choice.message.tool_calls
            [call] = choice.message.tool_calls
            assert json.loads(call.function.arguments) == ARGUMENTS
        assert len(grown) > 9
        # the next round: what came out goes back in
        said = whole.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "sunny"}
        assert client.chat.completions.create(**given | {"messages": [*HELLO, said, result]}).choices


# Histories that agents send back


def replayed(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]


@pytest.mark.parametrize(
    "arguments",
    ["{", '{"city": "Par', "not JSON", "[1]", "5", '"x"', "[" * 100_000, '{"a": NaN', "\ud800", 7, [1], True],
    ids=range(12),
)
def test_replayed_arguments_that_are_no_json_are_named(arguments: Any) -> None:
    response, _ = ask("x", messages=replayed(arguments), tools=[WEATHER])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert (
        "messages[1].tool_calls[0].function.arguments" in error["message"] or "surrogate" in error["message"]
    )


def test_replayed_arguments_reach_the_template() -> None:
    for arguments in (json.dumps(ARGUMENTS), ARGUMENTS, "", "{}", None):
        _, prompt = ask("x", messages=replayed(arguments), tools=[WEATHER])
        assert ("<parameter=city>\nSão Paulo\n</parameter>" in prompt) == bool(
            arguments and arguments != "{}"
        )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name"]),
        _VALUES
        | st.sampled_from(["user", "assistant", "tool", "system"])
        | st.fixed_dictionaries(
            {"function": st.fixed_dictionaries({"name": _VALUES, "arguments": _VALUES})}
        ).map(lambda call: [call]),
        max_size=4,
    ),
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(_MESSAGES, st.lists(_VALUES, max_size=2) | _VALUES, _VALUES)
def test_no_history_is_a_server_error(messages: Any, tools: Any, choice: Any) -> None:
    response, _ = ask("x", messages=messages, tools=tools, tool_choice=choice)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
