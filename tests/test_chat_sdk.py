"""The chat API, asked by OpenAI's own client: tools and reasoning, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from desks import ARGUMENTS, CALL, THOUGHT, Desk
from thinking import WEATHER

GIVEN: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "tools": [WEATHER]}


@pytest.fixture
def desk() -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(stack)


def client(desk: Desk, answer: str) -> openai.OpenAI:
    url = desk.address(answer) + "/v1"
    return desk.stack.enter_context(openai.OpenAI(base_url=url, api_key="k", max_retries=0))


def shape(choice: Any) -> Any:
    [call] = choice.message.tool_calls
    return (
        choice.finish_reason,
        choice.message.content,
        call.function.name,
        json.loads(call.function.arguments),
    )


def test_a_stream_adds_up_to_the_whole(desk: Desk) -> None:
    asked = client(desk, THOUGHT + CALL)
    [whole] = asked.chat.completions.create(**GIVEN).choices
    assert shape(whole) == ("tool_calls", "Let me see.", "get_weather", ARGUMENTS)
    message: Any = whole.message
    assert message.reasoning == message.reasoning_content == "I should look."
    with asked.chat.completions.stream(**GIVEN, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert shape(final.choices[0]) == shape(whole)
    assert final.usage is not None
    assert final.usage.completion_tokens == len((THOUGHT + CALL).encode())
    grown = "".join(e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta")
    assert json.loads(grown) == ARGUMENTS
    deltas: Any = [e.chunk.choices[0].delta for e in events if e.type == "chunk" and e.chunk.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I should look."


def test_the_result_of_a_tool_goes_back(desk: Desk) -> None:
    [choice] = client(desk, THOUGHT + CALL).chat.completions.create(**GIVEN).choices
    [call] = choice.message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*GIVEN["messages"], choice.message.model_dump(exclude_none=True), result]
    answer = client(desk, "</think>\n\nSunny.").chat.completions.create(**GIVEN | {"messages": history})
    assert answer.choices[0].message.content == "Sunny."
    assert "<tool_response>\nsunny\n</tool_response>" in desk.prompt
    assert "<parameter=city>\nSão Paulo\n</parameter>" in desk.prompt


def test_errors_are_of_the_kind_that_the_client_knows(desk: Desk) -> None:
    asked = client(desk, "ok")
    for fields, kind, words in (
        ({"model": "other"}, openai.NotFoundError, "'other' is not served here"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"what": 1}}, openai.BadRequestError, "unknown field 'what'"),
        ({"extra_body": {"seed": "1"}}, openai.BadRequestError, "seed: .*integer"),
    ):
        with pytest.raises(kind, match=words):
            asked.chat.completions.create(**GIVEN | fields)
    url = desk.address("ok", api_key="right") + "/v1"
    wrong = desk.stack.enter_context(openai.OpenAI(base_url=url, api_key="wrong", max_retries=0))
    with pytest.raises(openai.AuthenticationError):
        wrong.chat.completions.create(**GIVEN)
