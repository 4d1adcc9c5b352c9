"""The Responses API, asked by OpenAI's own client; a scripted engine says what a model would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import desks
import openai
import pytest
from desks import ARGUMENTS, CALL, THOUGHT

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of the coming days.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "strict": False,
}


class Desk(desks.Desk):
    """OpenAI's client, and the engine behind it."""

    def client(self, answer: str, reason: str = "stop") -> openai.OpenAI:
        url = self.address(answer, reason) + "/v1"
        return self.stack.enter_context(openai.OpenAI(base_url=url, api_key="k", max_retries=0))

    def ask(self, answer: str, reason: str = "stop", **fields: Any) -> Any:
        return self.client(answer, reason).responses.create(**{"model": "tiny", "input": "hello"} | fields)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(stack)


@pytest.fixture(scope="module")
def shared() -> Iterator[openai.OpenAI]:
    with ExitStack() as stack:
        yield Desk(stack).client("ok")


def shapes(response: Any) -> list[Any]:
    found: list[Any] = []
    for item in response.output:
        match item.type:
            case "function_call":
                found.append((item.type, item.status, item.name, json.loads(item.arguments)))
            case _:
                found.append((item.type, item.status, item.content[0].text))
    return found


EXPECTED = [
    ("reasoning", "completed", "I should look."),
    ("message", "completed", "Let me see."),
    ("function_call", "completed", "get_weather", ARGUMENTS),
]


def test_a_whole_response(desk: Desk) -> None:
    response = desk.ask(THOUGHT + CALL, tools=[WEATHER], instructions="Be brief.", metadata={"a": "b"})
    assert shapes(response) == EXPECTED
    assert response.status == "completed"
    assert response.output_text == "Let me see."
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert usage.input_tokens == len(desk.prompt.encode())
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == len("I should look.\n")
    assert "Be brief.<|im_end|>" in desk.prompt
    assert "<|im_start|>user\nhello<|im_end|>" in desk.prompt


def test_a_stream_adds_up_to_the_whole(desk: Desk) -> None:
    client = desk.client(THOUGHT + CALL + "\nDone.")
    given: Any = {"model": "tiny", "input": "hello", "tools": [WEATHER]}
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert shapes(events[-1].response) == shapes(whole) == [*EXPECTED, ("message", "completed", "\nDone.")]
    grown: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            grown[event.output_index] = grown.get(event.output_index, "") + event.delta
    assert [json.loads(t) if t[0] == "{" else t for t in grown.values()] == [s[-1] for s in shapes(whole)]
    with client.responses.stream(**given) as stream:  # the client checks each event against its own schema
        for _ in stream:
            pass
        final: Any = stream.get_final_response()
    assert shapes(final) == shapes(whole)


def test_reasoning_as_its_own_summary(desk: Desk) -> None:
    """For clients that show nothing else of it; what they send back is read again."""
    given: Any = {"model": "tiny", "input": "hello", "reasoning": {"summary": "auto"}}
    client = desk.client(THOUGHT + "Hi.")
    whole = client.responses.create(**given)
    [thought, _] = whole.output
    assert [(part.type, part.text) for part in thought.summary] == [("summary_text", "I should look.")]
    assert thought.content == []
    with client.responses.stream(**given) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()
    assert [p.text for p in final.output[0].summary] == ["I should look."]
    grown = "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta")
    assert grown == "I should look."
    kinds = [e.type for e in events]
    assert kinds.count("response.reasoning_summary_part.added") == 1
    assert kinds.count("response.reasoning_summary_part.done") == 1
    assert "response.reasoning_text.delta" not in kinds
    items = [item.model_dump(exclude_none=True) for item in whole.output]
    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "sunny"}
    history = [{"role": "user", "content": "hello"}, items[0], call, result]
    desk.ask("Hi.", input=history, tools=[WEATHER])
    assert "<think>\nI should look.\n</think>" in desk.prompt


def test_an_answer_that_was_cut_off(desk: Desk) -> None:
    response = desk.ask("I wonder", reason="length", max_output_tokens=8)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert shapes(response) == [("reasoning", "incomplete", "I wonder")]
    assert response.usage.output_tokens_details.reasoning_tokens == response.usage.output_tokens == 8
    last = list(desk.ask("I wonder", reason="length", stream=True))[-1]
    assert last.type == "response.incomplete"


@pytest.mark.parametrize("sealed", [True, False])
def test_a_conversation_is_sent_back_item_by_item(desk: Desk, sealed: bool) -> None:
    include = ["reasoning.encrypted_content"] if sealed else []
    response = desk.ask(THOUGHT + CALL, tools=[WEATHER], include=include)
    items = [item.model_dump(exclude_none=True) for item in response.output]
    assert ("encrypted_content" in items[0]) == sealed
    if sealed:
        items[0]["content"] = []
    call_id = items[2]["call_id"]
    history = [{"role": "user", "content": "hello"}, *items]
    history.append({"type": "function_call_output", "call_id": call_id, "output": "sunny"})
    desk.ask("Sunny.", input=history, instructions="Be brief.", tools=[WEATHER])
    assert (
        "<think>\nI should look.\n</think>\n\nLet me see.\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nSão Paulo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    ) in desk.prompt


def test_effort_and_tool_choice(desk: Desk) -> None:
    desk.ask("Hi.", reasoning={"effort": "none"})
    assert desk.prompt.endswith("</think>\n\n")
    choice = {"type": "function", "name": "get_weather"}
    rest = CALL.partition("<function=get_weather>\n")[2]
    assert shapes(desk.ask(rest, tools=[WEATHER], tool_choice=choice)) == EXPECTED[2:]
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    desk.ask("Hi.", input=items, instructions="Be brief.")
    assert "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>" in desk.prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not served"),
        ({"store": True}, "store is not served"),
        ({"background": True}, "background is not served"),
        ({"truncation": "auto"}, "truncation is not served"),
        ({"tools": [{"type": "web_search"}]}, "only functions"),
        ({"tools": [WEATHER | {"strict": "yes"}]}, "strict"),
        ({"text": {"format": {"type": "xml"}}}, r"text\.format"),
        ({"text": {"verbosity": "low"}}, r"text\.verbosity"),
        ({"reasoning": {"summary": "concise"}}, r"reasoning\.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort='high'"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] has type 'item_reference'"),
        ({"input": []}, "input is empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "arguments is no valid JSON",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"extra_body": {"what": 1}}, "unknown field 'what'"),
    ],
)
def test_refused_by_name(shared: openai.OpenAI, fields: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        shared.responses.create(**{"model": "tiny", "input": "hello"} | fields)
