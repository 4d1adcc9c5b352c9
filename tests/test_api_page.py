"""docs/api.md has every endpoint, every field, and every value of a refused field, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute
from scripted import ScriptedEngine
from snippets import ROOT

from plait.server import ServerSettings, anthropic_messages, create_app, protocol, responses_request, tokens

TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
SHARED = set(protocol.Request.model_fields)


def tables(section: str) -> Iterator[list[list[str]]]:
    """The tables of a section, as rows of cells, the first being the head."""
    [text] = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()]
        yield [row for row in rows if not set("".join(row)) <= {"-", "|"}]


def named(section: str, head: str) -> dict[str, str]:
    """What the first column of a section's table names, with the second column."""
    [rows] = [table[1:] for table in tables(section) if table[0][0].strip("| ") == head]
    return {name: row[1].strip("| ") for row in rows for name in CODE.findall(row[0])}


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("Fields of chat and completions", SHARED),
        ("POST /v1/chat/completions", set(protocol.ChatRequest.model_fields) - SHARED),
        ("POST /v1/completions", set(protocol.CompletionRequest.model_fields) - SHARED),
        ("POST /v1/responses", set(responses_request.ResponsesRequest.model_fields)),
        ("POST /v1/messages", set(anthropic_messages.MessagesRequest.model_fields)),
        ("POST /tokenize", set(tokens.TokenizeRequest.model_fields)),
        ("POST /detokenize", set(tokens.DetokenizeRequest.model_fields)),
    ],
)
def test_every_field_is_on_the_page(section: str, fields: set[str]) -> None:
    assert set(named(section, "field")) == fields


def test_the_fields_that_count_tokens() -> None:
    [text] = re.findall(r"^## POST /v1/messages/count_tokens\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE)
    said = set(CODE.findall(text)) - {'{"input_tokens": N}'}
    assert said == set(anthropic_messages.CountRequest.model_fields)


_OF_COMMON = protocol.Request.not_served


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ("Fields of chat and completions", _OF_COMMON),
        (
            "POST /v1/chat/completions",
            {k: v for k, v in protocol.ChatRequest.not_served.items() if k not in _OF_COMMON},
        ),
        (
            "POST /v1/completions",
            {k: v for k, v in protocol.CompletionRequest.not_served.items() if k not in _OF_COMMON},
        ),
        ("POST /v1/responses", responses_request._NOT_SERVED),
        ("POST /v1/messages", anthropic_messages._NOT_SERVED),
    ],
)
def test_every_refused_field_is_on_the_page(section: str, refused: protocol.Neutral) -> None:
    said = {}
    for name, cell in named(section, "refused").items():
        said[name] = {json.dumps(json.loads(value)) for value in CODE.findall(cell.partition("(see")[0])}
    assert said == {
        name: {json.dumps(int(v) if isinstance(v, float) else v) for v in values}
        for name, values in refused.items()
    }


def test_every_endpoint_is_on_the_page() -> None:
    app = create_app(ScriptedEngine(), ServerSettings(debug=True))  # type: ignore[arg-type]
    routes = {route.path.replace(":path", "") for route in app.routes if isinstance(route, APIRoute)}
    head = TEXT.partition("\n## ")[0]
    assert {name.split()[1] for name in CODE.findall(head) if re.match("(GET|POST) /", name)} == routes
