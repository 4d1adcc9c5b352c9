"""Any tokens a model may give, any stop strings, through each API: a stream adds up to the whole answer.

All of the server is real from the engine's outputs on: text out of tokens, stop strings, reasoning and calls,
the shapes of each API. In the place of the engine process stands a list of tokens.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from answering import CALL
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking import TAGS, WEATHER, template, tokenizer
from wire import events

from plait.engine import messages as m
from plait.engine.async_engine import AsyncEngine, EngineInfo
from plait.models.generation import GenerationDefaults
from plait.server import create_app

TOKENIZER = tokenizer()
END = TOKENIZER.token_id("<|im_end|>")
USER = [{"role": "user", "content": "hello"}]


class Told:
    """In the place of the engine's client: gives the same tokens to every request, some in each step."""

    def __init__(self) -> None:
        self.name = "told"
        self.args = SimpleNamespace(scheduling_policy="fcfs", seed=1)
        self.tokens: list[int] = []
        self.sizes = [1]
        self.reason = "stop"

    def check(self) -> None:
        pass

    def cancel(self, request_ids: list[str]) -> None:
        pass

    async def add(self, message: m.Add, queue: asyncio.Queue[Any]) -> None:
        at = step = 0
        while at < len(self.tokens):
            size = self.sizes[step % len(self.sizes)]
            part = tuple(self.tokens[at : at + size])
            at, step = at + size, step + 1
            reason = self.reason if at >= len(self.tokens) else None
            queue.put_nowait(m.Output(message.request_id, part, (), None, reason, None, 0))


TOLD = Told()
INFO = EngineInfo(
    "tiny", Path(), 10**6, TOKENIZER.vocab_size, [], GenerationDefaults(eos_token_ids=(END or 0,)), 1
)
APP = create_app(AsyncEngine(TOLD, INFO, TOKENIZER, template()))  # type: ignore[arg-type]


def ask(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of a stream."""

    async def run() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        transport = httpx.ASGITransport(app=APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
            whole = await client.post(path, json=body)
            stream = await client.post(path, json=body | {"stream": True})
        assert (whole.status_code, stream.status_code) == (200, 200), whole.text
        return whole.json(), events(stream.content)

    return asyncio.run(run())


Seen = dict[str, Any]
"""What a client has in the end: reasoning, content, and calls as [name, arguments]."""


def of_chat(whole: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[Seen, Seen]:
    [choice] = whole["choices"]
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
    ends = [choice["finish_reason"], choice["stop_reason"]]
    first = {
        "reasoning": message["reasoning"] or "",
        "content": message["content"] or "",
        "calls": calls,
        "end": ends,
    }
    second: Seen = {"reasoning": "", "content": "", "calls": [], "end": None}
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        second["reasoning"] += delta.get("reasoning") or ""
        second["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(second["calls"])
                second["calls"].append([call["function"]["name"], ""])
            second["calls"][call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"]:
            second["end"] = [choice["finish_reason"], choice["stop_reason"]]
    return first, second


def of_responses(whole: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[Any, Any]:
    def items(response: dict[str, Any]) -> list[Any]:
        return [
            (
                i["type"],
                i["status"],
                i.get("name"),
                i["arguments"] if "arguments" in i else i["content"][0]["text"],
            )
            for i in response["output"]
        ]

    grown: dict[int, str] = {}
    for event in chunks:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    last = chunks[-1]["response"]
    assert [grown.get(i, "") for i in range(len(last["output"]))] == [item[3] for item in items(last)]
    return (items(whole), whole["status"]), (items(last), last["status"])


def _text(item: dict[str, Any]) -> str:
    text: str = item["content"][0]["text"] if item.get("content") else ""
    return text


def of_messages(whole: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[Any, Any]:
    blocks: list[dict[str, Any]] = []
    for event in chunks:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(
                    {
                        "type": event["content_block"]["type"],
                        "text": "",
                        "name": event["content_block"].get("name"),
                    }
                )
            case "content_block_delta":
                delta = event["delta"]
                text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
                blocks[event["index"]]["text"] += text
    [end] = [event["delta"] for event in chunks if event["type"] == "message_delta"]
    shown = [
        {
            "type": b["type"],
            "text": b.get("text") or b.get("thinking") or b.get("input"),
            "name": b.get("name"),
        }
        for b in whole["content"]
    ]
    # A call that was cut off is in a stream as far as it came, and not in a whole message.
    kept = [b for b in blocks if b["type"] != "tool_use" or _whole(b["text"])]
    read = [b | {"text": json.loads(b["text"])} if b["type"] == "tool_use" else b for b in kept]
    calls = [b for b in shown if b["type"] == "tool_use"]
    assert len(blocks) - len(kept) <= 1
    return (shown, len(calls), whole["stop_reason"]), (read, len(calls), end["stop_reason"])


def _whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_WORDS = [
    *TAGS,
    CALL,
    "<function=get_weather>\n",
    "<parameter=city>\n",
    "é",
    "👋🏽",
    "São",
    "\n",
    "text",
    "<",
    '"',
]
_TOKENS = st.lists(
    st.sampled_from(_WORDS).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False))
    | st.integers(0, TOKENIZER.vocab_size - 1).map(lambda token: [token])
    | st.text(max_size=3).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False)),
    min_size=1,
    max_size=12,
).map(lambda parts: [token for part in parts for token in part] or [65])


@st.composite
def answers(draw: Any) -> tuple[list[int], list[int], str, list[str]]:
    """Tokens, how many come in each step, why the answer ends, and stop strings: most are in the text."""
    tokens = draw(_TOKENS)
    text = TOKENIZER.decode(tokens, skip_special_tokens=False)
    stops = []
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        piece = text[at : at + draw(st.integers(1, 4))]
        stops.append(draw(st.sampled_from([piece, "👋", "é<", "\ufffd"])) or "x")
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    reason = draw(st.sampled_from(["stop", "length"]))
    return tokens, sizes, reason, stops


def check(made: tuple[list[int], list[int], str, list[str]]) -> None:
    TOLD.tokens, TOLD.sizes, TOLD.reason, stops = made
    functions = {"tools": [WEATHER], "temperature": 0}
    body = {"messages": USER, "max_tokens": 500, **functions} | ({"stop": stops} if stops else {})
    whole, stream = of_chat(*ask("/v1/chat/completions", body))
    assert stream == whole
    ended = whole["calls"][:-1] if whole["end"][0] != "tool_calls" else whole["calls"][:1]
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in ended)
    flat = {"type": "function", **WEATHER["function"]}
    body = {"input": "hello", "tools": [flat], "max_output_tokens": 500}
    whole, stream = of_responses(*ask("/v1/responses", body))
    assert stream == whole
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    body = {"model": "tiny", "messages": USER, "tools": [tool], "max_tokens": 500}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 400}} | (
        {"stop_sequences": stops} if stops else {}
    )
    whole, stream = of_messages(*ask("/v1/messages", body))
    assert stream == whole


@settings(max_examples=50, deadline=None, derandomize=True)
@given(answers())
def test_any_answer_streams_as_it_is_whole(made: Any) -> None:
    check(made)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(answers())
def test_many_answers_stream_as_they_are_whole(made: Any) -> None:
    check(made)
