"""Any JSON at all as the body of any endpoint: an answer, or a 4xx that names the fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, post
from thinking import TEMPLATE

from plait.server.anthropic_messages import CountRequest, MessagesRequest
from plait.server.protocol import ChatRequest, CompletionRequest
from plait.server.responses_request import ResponsesRequest
from plait.server.tokens import DetokenizeRequest, TokenizeRequest

ENDPOINTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/v1/messages": (
        MessagesRequest,
        {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    ),
    "/v1/messages/count_tokens": (
        CountRequest,
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    ),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65]}),
}
_WORDS = st.sampled_from(
    [
        "type", "text", "role", "user", "assistant", "system", "tool", "content", "function", "name", "f",
        "arguments", "{}", "tool_use", "tool_result", "thinking", "enabled", "message", "function_call",
        "input_text", "reasoning", "function_call_output", "call_id", "output", "ephemeral", "cache_control",
        "id", "input", "tool_use_id", "auto", "required", "any", "none", "parameters", "input_schema",
        "budget_tokens", "format", "json_schema", "\ud800",
    ]
)  # fmt: skip
_LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.floats() | _WORDS
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=10,
)


def scripted() -> ScriptedEngine:
    return ScriptedEngine("Hi.", None, TEMPLATE, 10_000)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_body_is_a_server_error(path: str, data: Any) -> None:
    model, least = ENDPOINTS[path]
    names = st.sampled_from([*model.model_fields, "store", "best_of", "what"])
    body = least | data.draw(st.dictionaries(names, _VALUES, max_size=3))
    response = post(path, body, engine=scripted)
    assert response.status_code < 500, (json.dumps(body), response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.status_code >= 400
        assert error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_body_that_nests_without_end(path: str) -> None:
    model, least = ENDPOINTS[path]
    for name in model.model_fields:
        deep: Any = []
        for _ in range(800):
            deep = [deep] if len(name) % 2 else {"a": deep}
        response = post(
            path, least | {name: deep}, engine=lambda: ScriptedEngine("Hi.", None, TEMPLATE, 10_000)
        )
        assert response.status_code in (200, 400), (name, response.text)
