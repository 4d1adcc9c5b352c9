"""From the tokens of an answer to its parts: detokenizer and parser together, cut at every token and byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parsing import CODER, HERMES, MISTRAL_NEW, TOOLS, summary
from thinking import TEMPLATE, backend
from tokenizers import AddedToken

from plait.core.sampling_params import SamplingParams
from plait.text.answer import AnswerText
from plait.text.parsing import Event, OutputFormat
from plait.text.tokenizer import Tokenizer

PROMPT = "<|im_start|>assistant\n<think>\n"
THOUGHT = "Où? 日本 🏳️‍🌈 perhaps.\n</think>\n\n"


def make(*special: str) -> Tokenizer:
    made = backend()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return Tokenizer(made, eos_token="<|im_end|>")


PLAIN = make()
CONTROL = make("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool_call>", "</think>")
"""Tags that are special tokens, and so hidden from the text of an answer."""


def through(
    tokenizer: Tokenizer, form: OutputFormat, tokens: Sequence[int], group: int, **params: Any
) -> tuple[dict[str, Any], int]:
    """What a client gets of an answer, ``group`` tokens at a time; and how many tokens were reasoning."""
    text = AnswerText(tokenizer, [], SamplingParams(**params), form.shown_ids)
    parser = form.parser(PROMPT, TOOLS)
    events: list[Event] = []
    for first in range(0, len(tokens), group):
        added, ids, starts = "", [], []
        for token in tokens[first : first + group]:
            piece = text.push(token)
            added += piece.text
            ids += [t for t, _ in piece.tokens]
            starts += piece.starts
        events += parser.feed(added, ids, starts)
    piece = text.finish()
    events += parser.feed(piece.text, [t for t, _ in piece.tokens], piece.starts)
    events += parser.finish("stop")
    return summary(events), parser.reasoning_tokens


def as_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte: characters, tags and escapes come apart wherever they can."""
    alphabet = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [alphabet[bytes([b])] for b in text.encode()]


@pytest.mark.parametrize("group", [1, 2, 7, 10**6])
@pytest.mark.parametrize(("tools", "text"), [("qwen3_coder", CODER), ("hermes", HERMES)])
def test_every_token_and_every_byte(tools: str, text: str, group: int) -> None:
    form = OutputFormat(PLAIN, TEMPLATE, "qwen3", tools)
    tokens, single = PLAIN.encode(THOUGHT + text), as_bytes(PLAIN, THOUGHT + text)
    whole, _ = through(PLAIN, form, single, 10**6)
    assert whole["reasoning"] == THOUGHT.partition("\n</think>")[0]
    assert [json.loads(arguments) for _, arguments, _ in whole["calls"]]
    for ids in (tokens, single):
        found, count = through(PLAIN, form, ids, group)
        assert found == whole
        before = THOUGHT.partition("</think>")[0]
        assert count == (len(before.encode()) if ids is single else len(PLAIN.encode(before)))


@pytest.mark.parametrize("group", [1, 3, 10**6])
@pytest.mark.parametrize(("tools", "text"), [("mistral", MISTRAL_NEW), ("qwen3_coder", CODER)])
def test_tags_that_are_special_tokens(tools: str, text: str, group: int) -> None:
    """They are seen though they are hidden from the text; text that spells them is no tag."""
    form = OutputFormat(CONTROL, TEMPLATE, "qwen3", tools)
    assert form.shown_ids
    found, count = through(CONTROL, form, CONTROL.encode(THOUGHT + text), group)
    assert found["reasoning"] == THOUGHT.partition("\n</think>")[0]
    assert [name for name, _, _ in found["calls"]] == ["weather", "now"]
    assert count == len(CONTROL.encode(THOUGHT.partition("</think>")[0]))
    spelled, _ = through(CONTROL, form, as_bytes(CONTROL, "a </think> b [TOOL_CALLS]now{}"), group)
    assert spelled == {"reasoning": "a </think> b [TOOL_CALLS]now{}", "content": "", "calls": []}
    hidden, _ = through(CONTROL, form, CONTROL.encode("a<|im_start|>b</think>c<|im_end|>d"), group)
    assert (hidden["reasoning"], hidden["content"]) == ("ab", "cd")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, PLAIN.vocab_size - 1), max_size=60), st.integers(1, 9), st.booleans())
def test_any_tokens_in_any_groups(tokens: list[int], group: int, stops: bool) -> None:
    """Random weights say anything: the parts do not depend on how tokens come."""
    params = {"stop": ["zzz", "the quick"]} if stops else {}
    form = OutputFormat(PLAIN, TEMPLATE)
    stop = next((i for i in range(len(tokens)) if stops and _stopped(tokens[: i + 1], params)), None)
    tokens = tokens if stop is None else tokens[:stop]
    whole = through(PLAIN, form, tokens, 10**6, **params)
    assert through(PLAIN, form, tokens, group, **params) == whole
    assert through(PLAIN, form, tokens, 1, **params) == whole


def _stopped(tokens: Sequence[int], params: dict[str, Any]) -> bool:
    text = AnswerText(PLAIN, [], SamplingParams(**params))
    return any(text.push(token).stopped for token in tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, PLAIN.vocab_size - 1), max_size=40))
def test_tokens_know_where_they_begin(tokens: list[int]) -> None:
    text = AnswerText(PLAIN, [], SamplingParams())
    pieces = [*map(text.push, tokens), text.finish()]
    starts = [start for piece in pieces for start in piece.starts]
    assert [t for piece in pieces for t, _ in piece.tokens] == tokens
    assert len(starts) == len(tokens)
    assert starts == sorted(starts)
    shown = 0
    for piece in pieces:
        assert all(shown <= start <= shown + len(piece.text) for start in piece.starts)
        shown += len(piece.text)
    visible = [t not in PLAIN.special_ids for t in tokens]
    for i, (start, seen) in enumerate(zip(starts, visible, strict=True)):
        if seen and all(PLAIN.token_bytes(t).isascii() for t in tokens[: i + 1]):
            assert start == len(PLAIN.decode(tokens[:i]))
