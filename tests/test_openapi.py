"""The OpenAPI document says what the server does: answers are held against it, and it against requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from desks import CALL, THOUGHT
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis import checks
from scripted import ScriptedEngine, serve
from sockets import listening
from thinking import TEMPLATE, WEATHER

from plait.engine.outputs import CompletionDelta, RequestFailed
from plait.server import ServerSettings, create_app

USER = [{"role": "user", "content": "hello"}]
FUNCTION = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"]}
ANTHROPIC_TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
MESSAGE = {"model": "tiny", "max_tokens": 2000, "messages": USER}
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}


def engine(answer: str = THOUGHT + CALL, reason: str = "stop") -> ScriptedEngine:
    return ScriptedEngine(answer, None, TEMPLATE, 10_000, reason)


@cache
def document(**more: Any) -> dict[str, Any]:
    return create_app(engine(), ServerSettings(**more)).openapi()  # type: ignore[arg-type]


def fits(path: str, response: httpx.Response, method: str = "post") -> None:
    """Fail where the document does not know the status, the kind of content, or what is in it."""
    made = document()
    responses = made["paths"][path][method]["responses"]
    assert str(response.status_code) in responses, response.text
    kind = response.headers.get("content-type", "").split(";")[0]
    content = responses[str(response.status_code)].get("content", {})
    assert kind in content or (not content and not response.content), response.text
    if kind == "application/json":
        schema = content[kind]["schema"] | {"components": made["components"]}
        faults = sorted(Draft202012Validator(schema).iter_errors(response.json()), key=lambda e: e.path)
        assert not faults, (faults[0].json_path, faults[0].message)


@pytest.mark.parametrize(
    ("path", "body", "made"),
    [
        ("/v1/chat/completions", {"messages": USER, "tools": [WEATHER]}, engine),
        ("/v1/chat/completions", {"messages": USER, "n": 2, **LOGPROBS}, engine),
        ("/v1/chat/completions", {"messages": USER, "include_reasoning": False}, engine),
        ("/v1/chat/completions", {"messages": USER, "stop": "s"}, lambda: engine("I wonder", "length")),
        ("/v1/chat/completions", {"messages": USER, "stream": True}, engine),
        ("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "logprobs": 2, "echo": True}, engine),
        ("/v1/completions", {"prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True}, engine),
        ("/v1/completions", {"prompt": "ab", "stream": True}, engine),
        ("/v1/responses", {"input": "hello", "tools": [FUNCTION], "metadata": {"a": "b"}}, engine),
        ("/v1/responses", {"input": "x", "include": ["reasoning.encrypted_content"]}, engine),
        ("/v1/responses", {"input": "x", "reasoning": {"summary": "auto"}}, engine),
        ("/v1/responses", {"input": "x", "max_output_tokens": 8}, lambda: engine("I wonder", "length")),
        ("/v1/responses", {"input": "x", "stream": True}, engine),
        ("/v1/messages", MESSAGE | {"tools": [ANTHROPIC_TOOL], "thinking": {"type": "adaptive"}}, engine),
        ("/v1/messages", MESSAGE | {"stop_sequences": ["z"]}, lambda: engine("Hi.", "length")),
        ("/v1/messages", MESSAGE | {"stream": True}, engine),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": USER}, engine),
        ("/tokenize", {"prompt": "ab", "return_token_strs": True}, engine),
        ("/tokenize", {"messages": USER}, engine),
        ("/detokenize", {"tokens": [65]}, engine),
    ],
)
def test_answers_are_as_documented(
    path: str, body: dict[str, Any], made: Callable[[], ScriptedEngine]
) -> None:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> httpx.Response:
        return await client.post(path, json=body)

    response = serve(use, made)
    assert response.status_code == 200, response.text
    fits(path, response)


def test_operations_are_as_documented() -> None:
    async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> dict[str, httpx.Response]:
        paths = {"/v1/models": "", "/v1/models/{name}": "/v1/models/tiny", "/metrics": "", "/version": ""}
        paths |= {"/health": "", "/ping": ""}
        return {path: await client.get(asked or path) for path, asked in paths.items()}

    for path, response in serve(use, engine).items():
        assert response.status_code == 200
        fits(path, response, "get")


class Failing(ScriptedEngine):
    """Gives nothing usable."""

    async def stream(self, *args: Any, **more: Any) -> AsyncIterator[CompletionDelta]:
        raise RequestFailed("every logit is NaN")
        yield


class Dead(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(template=TEMPLATE)
        self.dead.set()


ANSWERING = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "ab"},
    "/v1/responses": {"input": "ab"},
    "/v1/messages": MESSAGE,
}


@pytest.mark.parametrize("path", ANSWERING)
def test_errors_are_as_documented(path: str) -> None:
    body = ANSWERING[path]

    def ask(made: Callable[[], ScriptedEngine] = engine, more: Any = None, **limits: Any) -> httpx.Response:
        async def use(client: httpx.AsyncClient, _: ScriptedEngine) -> httpx.Response:
            return await client.post(path, json=body | (more or {}))

        response = serve(use, made, ServerSettings(**limits))
        fits(path, response)
        return response

    assert ask(more={"temperature": "hot"}).status_code == 400
    assert ask(api_key="k").status_code == 401
    assert ask(more={"model": "other"}).status_code == 404
    assert ask(max_body_bytes=5).status_code == 413
    assert ask(Failing).status_code == 500
    assert ask(Dead).status_code == 503


def test_each_operation_has_a_name_of_its_own_and_no_422() -> None:
    made = document(api_key="k", debug=True)
    operations = [o for path in made["paths"].values() for o in path.values()]
    names = [o["operationId"] for o in operations]
    assert len(set(names)) == len(names) >= 15
    assert not any("422" in o["responses"] for o in operations)
    assert not any("ValidationError" in name for name in made["components"]["schemas"])
    assert made["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"key": []}]
    assert "security" not in made["paths"]["/health"]["get"]


def test_requests_that_are_not_served_are_documented_as_such() -> None:
    schema = document()["components"]["schemas"]["ChatRequest"]
    valid = Draft202012Validator(schema | {"components": document()["components"]}).is_valid
    assert valid({"messages": USER, "store": False, "best_of": 1, "stop": None})
    assert not valid({"messages": USER, "store": True})
    assert not valid({"messages": USER, "seed": "1"})
    assert not valid({"messages": USER, "what": 1})


# -- anything that the document allows, and what it does not ------------------------------------------


CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
OPERATIONS = [(path, method) for path, operations in document()["paths"].items() for method in operations]


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    with listening(engine("Hi.")) as url:
        yield schemathesis.openapi.from_url(url + "/openapi.json")


def hold(described: Any, path: str, method: str, examples: int) -> None:
    """Send what the document allows, and what it does not; hold every answer against it."""
    operation = described[path][method.upper()]
    modes = [schemathesis.GenerationMode.POSITIVE]
    if operation.body:  # else there is nothing to get wrong
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def each(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        each()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_document_holds(described: Any, path: str, method: str) -> None:
    hold(described, path, method, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_document_holds_for_many_requests(described: Any, path: str, method: str) -> None:
    hold(described, path, method, 200)
