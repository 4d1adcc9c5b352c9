"""The Anthropic API, asked by Anthropic's own client; a scripted engine says what a model would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import desks
import pytest
from desks import CALL, THOUGHT
from scripted import ScriptedEngine, post
from sockets import listening
from thinking import TEMPLATE

from plait.server import ServerSettings

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of the coming days.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
USER = {"role": "user", "content": "hello"}
THINK = {"type": "enabled", "budget_tokens": 1024}
Ask = Callable[..., Any]


class Desk(desks.Desk):
    """Anthropic's client, and the engine behind it."""

    def client(self, answer: str, reason: str = "stop", **settings: Any) -> anthropic.Anthropic:
        url = self.address(answer, reason, **settings)
        return self.stack.enter_context(anthropic.Anthropic(base_url=url, api_key="k", max_retries=0))

    def ask(self, answer: str, reason: str = "stop", **fields: Any) -> anthropic.types.Message:
        given = {"model": "tiny", "max_tokens": 2000, "messages": [USER]} | fields
        return self.client(answer, reason).messages.create(**given)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(stack)


@pytest.fixture(scope="module")
def shared() -> Iterator[anthropic.Anthropic]:
    with ExitStack() as stack:
        yield Desk(stack).client("ok")


def shapes(message: anthropic.types.Message) -> list[Any]:
    return [
        (b.type, b.name, b.input) if b.type == "tool_use" else (b.type, getattr(b, b.type))
        for b in message.content
    ]


EXPECTED = [
    ("thinking", "I should look."),
    ("text", "Let me see."),
    ("tool_use", "get_weather", {"city": "São Paulo", "days": 3}),
]


def test_a_whole_message(desk: Desk) -> None:
    message = desk.ask(THOUGHT + CALL, tools=[WEATHER], thinking=THINK)
    assert shapes(message) == EXPECTED
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "tool_use", None)
    usage = message.usage
    assert usage.cache_read_input_tokens == 4
    assert usage.input_tokens + 4 == len(desk.prompt.encode())
    assert usage.output_tokens == len((THOUGHT + CALL).encode())
    assert desk.prompt.endswith("<think>\n")


def test_a_stream_adds_up_to_the_whole(desk: Desk) -> None:
    given: Any = {
        "model": "tiny",
        "max_tokens": 2000,
        "messages": [USER],
        "tools": [WEATHER],
        "thinking": THINK,
    }
    client = desk.client(THOUGHT + CALL + "\nDone.")
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert shapes(final) == shapes(whole) == [*EXPECTED, ("text", "\nDone.")]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds.count("input_json") > 9  # the arguments came piece by piece
    assert final.content[0].signature  # type: ignore[union-attr]


def test_what_the_parser_tells_in_pieces_is_one_block(desk: Desk) -> None:
    """A tag within thoughts that turns out to be none comes by itself; in a stream it never was a block."""
    thought = "<tool_call> is a tag, <tool_call> too."
    message = desk.ask(thought + "\n</think>\n\na <tool_call> b", thinking=THINK)
    assert shapes(message) == [("thinking", thought), ("text", "a <tool_call> b")]


def test_thinking_is_off_unless_asked_for(desk: Desk) -> None:
    message = desk.ask("Hi.")
    assert shapes(message) == [("text", "Hi.")]
    assert desk.prompt.endswith("</think>\n\n")
    desk.ask("Hi.", thinking={"type": "disabled"})
    assert desk.prompt.endswith("</think>\n\n")
    on = desk.client("So.\n</think>\n\nHi.", default_chat_template_kwargs={"enable_thinking": True})
    assert len(on.messages.create(model="tiny", max_tokens=50, messages=[USER]).content) == 2  # type: ignore[list-item]
    budget = desk.ask("x", thinking=THINK) and desk.engine.asked[-1][1].thinking_budget
    assert budget.tokens == 1024
    assert shapes(desk.ask(THOUGHT + "Hi.", thinking=THINK | {"display": "omitted"})) == [("text", "Hi.")]


def test_stop_reasons(desk: Desk) -> None:
    assert desk.ask("So", reason="length", thinking=THINK).stop_reason == "max_tokens"
    assert desk.ask("Hi.").stop_reason == "end_turn"


def test_history_reaches_the_template(desk: Desk) -> None:
    mark = {"type": "ephemeral"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": mark}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no such city"}],
                    "is_error": True,
                    "cache_control": mark,
                },
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": mark | {"ttl": "1h"}}]
    desk.ask("ok", messages=messages, system=system, tools=[WEATHER], thinking=THINK)
    for part in (
        "Be brief.<|im_end|>",
        "<|im_start|>user\nWeather?<|im_end|>",
        "<think>\nLook it up.\n</think>\n\nOne moment.\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nRome\n</parameter>",
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nError: no such city\n</tool_response>",
    ):
        assert part in desk.prompt


def test_tokens_are_counted_as_a_request_would_have_them(desk: Desk) -> None:
    client = desk.client("ok")
    given: Any = {"model": "tiny", "messages": [USER], "system": "Be brief.", "tools": [WEATHER]}
    count = client.messages.count_tokens(**given).input_tokens
    client.messages.create(max_tokens=9, **given)
    assert count == len(desk.prompt.encode())


@pytest.mark.parametrize("choice", ["any", "tool"])
def test_a_call_can_be_demanded(desk: Desk, choice: str) -> None:
    end = "<function=get_weather>\n"
    fields: Any = {"type": choice} | ({"name": "get_weather"} if choice == "tool" else {})
    message = desk.ask(CALL.partition(end)[2], tools=[WEATHER], tool_choice=fields)
    assert shapes(message) == EXPECTED[2:]
    assert desk.prompt.endswith(end)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\]\.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "belongs to the assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "'y'"),
        ({"system": [{"type": "image"}]}, r"system\[0\]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a b"}]}, "name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "none of tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "below max_tokens"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers is not served"),
        ({"extra_body": {"what": 1}}, "unknown field 'what'"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {}}]}, "ephemeral"),
    ],
)
def test_refused_by_name(shared: anthropic.Anthropic, fields: Any, words: str) -> None:
    given = {"model": "tiny", "max_tokens": 2000, "messages": [USER]} | fields
    with pytest.raises(anthropic.BadRequestError, match=words) as fault:
        shared.messages.create(**given)
    body: Any = fault.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


def test_other_errors(desk: Desk) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other"):
        desk.ask("ok", model="other")
    engine = ScriptedEngine("ok", None, TEMPLATE, 10_000)
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER]}
    key = ServerSettings(api_key="right")
    assert post("/v1/messages", body, engine=lambda: engine, settings=key).status_code == 401
    with listening(engine, key) as url:
        client = anthropic.Anthropic(base_url=url, api_key="right", max_retries=0)
        assert client.messages.create(**body).content  # type: ignore[call-overload]
