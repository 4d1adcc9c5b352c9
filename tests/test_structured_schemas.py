"""Answers of random weights, at temperature 1, to schemas of every kind that is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from offline import make_core, run
from schemas import SCHEMAS, generated
from thinking import thinking_model, tokenizer

from plait.core.sampling_params import SamplingParams, Structure
from plait.text.structure import of_schema

TOKENS = tokenizer()
FAVOURED = {TOKENS.encode(text)[0]: 3.0 for text in ('"', "}", "]")}
"""Random weights end a string once in some hundred tokens; these make them end it sooner."""


def check(folder: Path, schemas: list[dict[str, Any]], **settings: Any) -> None:
    core = make_core(thinking_model(folder), load_format="dummy", **settings)
    asked = SamplingParams(max_tokens=1500, temperature=1.0, logit_bias=FAVOURED)
    params = [replace(asked, structure=Structure(of_schema(schema))) for schema in schemas]
    prompts = [TOKENS.encode(f"{i}: answer") for i in range(len(schemas))]
    answers = run(core, prompts, params, at_once=32, seeds=range(len(schemas)))
    core.close()
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish_reason == "stop", (schema, answer.failed)
        value = json.loads(TOKENS.decode(answer.tokens))
        jsonschema.Draft202012Validator(schema).validate(value)


def test_answers_are_what_their_schemas_say(tmp_path: Path) -> None:
    assert len(SCHEMAS) >= 40
    check(tmp_path, SCHEMAS)


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_to_many_schemas(tmp_path: Path, ahead: bool) -> None:
    check(tmp_path, [generated(seed) for seed in range(200)], async_scheduling=ahead)
