"""The JSON Schema test suite over `plait serve`: every answer keeps to its schema, or a 400 says why not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import json_schema_suite
import jsonschema
import pytest
from json_schema_suite import Case
from live import LiveServer
from thinking import thinking_model, tokenizer

TOKENS = tokenizer()
ENDINGS = {str(TOKENS.encode(text)[0]): 5.0 for text in ('"', "}", "]")}
"""Random weights end a string once in some hundred tokens; these make them end it sooner."""
VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
}
SERVED = 200
"""The least of the suite's schemas that are served."""


def ask(client: httpx.Client, case: Case, seed: int) -> httpx.Response:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": case.schema}}
    body = {"messages": [{"role": "user", "content": f"{seed}: answer"}], "response_format": form}
    body |= {"temperature": 1, "seed": seed, "max_tokens": 1500, "logit_bias": ENDINGS}
    return client.post("/v1/chat/completions", json=body | {"thinking_token_budget": 4})


def keywords(schema: Any) -> set[str]:
    """Every name in a schema that may be one of its keywords."""
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    return set(schema).union(*map(keywords, schema.values())) if isinstance(schema, dict) else set()


def names_the_fault(case: Case, message: str) -> bool:
    """Whether a refusal says what in the schema is not served."""
    faults = ("Unimplemented keys: [", "Unknown format: ", "schema is false", "not present in a registry")
    words = {*keywords(case.schema), *faults, "Anchor '", "a JSON schema is an object"}
    return any(word in message for word in words)


@pytest.mark.slow
def test_every_schema_is_kept_or_refused(tmp_path: Path) -> None:
    try:
        suite = list(json_schema_suite.cases(json_schema_suite.fetch(tmp_path)))
    except OSError as fault:
        pytest.skip(f"the suite cannot be had: {fault}")
    (tmp_path / "model").mkdir()
    server = LiveServer(thinking_model(tmp_path / "model"), "--max-model-len", "4096")
    faults, served = [], 0
    try:
        with httpx.Client(base_url=server.url, timeout=300) as client, ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda pair: ask(client, pair[1], pair[0]), enumerate(suite)))
    finally:
        server.stop()
    for case, reply in zip(suite, replies, strict=True):
        if reply.status_code == 400:
            if not names_the_fault(case, reply.json()["error"]["message"]):
                faults.append(f"{case}: {reply.text}")
            continue
        served += 1
        [choice] = reply.json()["choices"]
        try:
            assert choice["finish_reason"] == "stop"
            VALIDATORS[case.draft](case.schema).validate(json.loads(choice["message"]["content"]))
        except (AssertionError, ValueError, jsonschema.ValidationError) as fault:
            faults.append(f"{case}: {choice}: {fault}")
    assert faults == []
    assert served >= SERVED
