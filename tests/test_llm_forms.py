"""Structured output and bounded reasoning in the offline API, with a model that thinks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from thinking import thinking_model, tokenizer

from plait import LLM, SamplingParams, StructuredOutputsParams
from plait.engine.outputs import RequestRefused
from plait.sampling_params import StructuredOutputsParams as AtTheirPlace

TOKENS = tokenizer()
BIAS = {TOKENS.encode(text)[0]: 4.0 for text in ('"', "}", "]")}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "Plan my days in Rome."}]


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = thinking_model(tmp_path_factory.mktemp("thinking"))
    settings: dict[str, Any] = {"load_format": "dummy", "seed": 1, "max_model_len": 4096}
    with LLM(str(folder), async_scheduling=request.param, **settings) as llm:
        yield llm


def asked(budget: int | None = None, **form: Any) -> SamplingParams:
    outputs = StructuredOutputsParams(**form) if form else None
    return SamplingParams(
        temperature=1.0, seed=3, max_tokens=1500, logit_bias=BIAS, structured_outputs=outputs,
        thinking_token_budget=budget,
    )  # fmt: skip


def texts(outputs: list[Any]) -> list[str]:
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
    return [output.outputs[0].text for output in outputs]


def thinking_of(output: Any) -> int:
    """Tokens before the tag that ends the reasoning."""
    return list(output.outputs[0].token_ids).index(TOKENS.token_id("</think>"))


def test_the_forms_of_vllm(llm: LLM) -> None:
    forms: list[dict[str, Any]] = [
        {"json": SCHEMA}, {"json": json.dumps(SCHEMA)}, {"json_object": True}, {"regex": "[a-c]{2}-[0-9]{3}"},
        {"choice": ["left", "right"]}, {"choice": ("up", "down")}, {"grammar": 'start: "x" /[yz]{1,5}/'},
    ]  # fmt: skip
    a, b, obj, regex, choice, pair, grammar = texts(llm.generate(["Go on:"] * 7, [asked(**f) for f in forms]))
    for text in (a, b):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert a == b  # the same schema, seed and prompt
    assert isinstance(json.loads(obj), dict)
    assert re.fullmatch("[a-c]{2}-[0-9]{3}", regex)
    assert choice in ("left", "right")
    assert pair in ("up", "down")
    assert re.fullmatch("x[yz]{1,5}", grammar)


def test_thinking_comes_first_and_is_free(llm: LLM) -> None:
    outputs = llm.chat(USER, asked(budget=12, json=SCHEMA))
    [answer] = texts(outputs)
    thought, closed, content = answer.partition("</think>")
    assert closed
    assert thinking_of(outputs[0]) == 12  # the budget, the line break before the tag included
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(thought)
    jsonschema.validate(json.loads(content), SCHEMA)
    [plain] = texts(llm.chat(USER, asked(json=SCHEMA), chat_template_kwargs={"enable_thinking": False}))
    jsonschema.validate(json.loads(plain), SCHEMA)


def test_a_prompt_that_ends_inside_the_reasoning_is_one_that_thinks(llm: LLM) -> None:
    rendered = llm.get_tokenizer().apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    ids = llm.get_tokenizer().apply_chat_template(USER, add_generation_prompt=True)
    params = asked(budget=12, json=SCHEMA)
    by_chat, by_text, by_ids = texts([*llm.chat(USER, params), *llm.generate([rendered, ids], params)])
    assert by_chat == by_text == by_ids
    [at_once] = texts(llm.generate("Plan my days in Rome.", asked(json=SCHEMA)))
    jsonschema.validate(json.loads(at_once), SCHEMA)


def test_a_budget_alone(llm: LLM) -> None:
    [whole] = llm.chat(USER, SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=5))
    assert thinking_of(whole) == 5
    with pytest.raises(RequestRefused, match="ends inside the reasoning"):
        llm.generate("x", SamplingParams(thinking_token_budget=5))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "asks for nothing"),
        ({"json_object": False}, "asks for nothing"),
        ({"regex": "a", "choice": ["a"]}, "choice and regex"),
    ],
)
def test_a_form_that_says_nothing_or_two_things(form: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"not": {}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"json": "{"}, "no JSON"),
        ({"json": ["a"]}, "a JSON schema is an object"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": 5}, "wrong type"),
        ({"choice": []}, "choice is a list of texts"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is not served"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, "disable_any_whitespace is not served"),
        ({"json": SCHEMA, "structural_tag": "x"}, "structural_tag is not served"),
    ],
)
def test_forms_that_cannot_be_had(llm: LLM, form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=rf"prompts\[1\].*{words}"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=1), asked(**form)])
    assert llm.generate("a", SamplingParams(max_tokens=2))


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    for budget in (-1, 1.5, True):
        with pytest.raises(ValueError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=budget)  # type: ignore[arg-type]
    assert AtTheirPlace is StructuredOutputsParams


def test_what_vllm_has_and_plait_has_not(llm: LLM) -> None:
    for name in ("encode", "embed", "classify", "score", "beam_search", "sleep", "get_metrics"):
        assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="no pooling models"):
        llm.encode("a")
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        llm.generat("a")


def test_the_prefix_cache_is_forgotten(llm: LLM) -> None:
    prompt = [7] * 200
    params = SamplingParams(temperature=0, max_tokens=2)
    llm.generate(prompt, params)
    assert llm.generate(prompt, params)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params)[0].num_cached_tokens == 0
