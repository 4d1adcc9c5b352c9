"""Conversations with a thinking model and its tools: what the cache gives back (real engine)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from checkpoints import VOCAB, checkpoint
from offline import make_core
from thinking import WEATHER, template, tokenizer

from plait.core.sampling_params import SamplingParams
from plait.engine.core import EngineCore
from plait.text.conversation import Conversation, encode_conversation

TEMPLATE = template()
TOKENIZER = tokenizer()
assert TOKENIZER.vocab_size <= VOCAB

TEXT = "the quick brown fox jumps over a lazy dog and does not mind at all Numbers late heard"


def prose(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(TEXT.split()) for _ in range(words))


def ask(core: EngineCore, messages: Sequence[Mapping[str, Any]], **more: Any) -> tuple[Conversation, int]:
    """Send a conversation; its prompt, and how much of it came from the cache."""
    prompt = encode_conversation(TEMPLATE, TOKENIZER, messages, **more)
    answer = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    core.add(
        "r", prompt.tokens, answer, seed=0, max_tokens=40,
        tail=prompt.boundaries.tail, boundaries=prompt.boundaries.marked,
    )  # fmt: skip
    cached = None
    while core.has_work:
        for progress in core.step().progress:
            cached = progress.num_cached_tokens
    assert cached is not None
    return prompt, cached


def length(text: str) -> int:
    return len(TOKENIZER.encode(text))


GENERATION = length("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("thinking", [True, False])
def test_each_turn_computes_what_is_new(family: str, page_size: int, thinking: bool) -> None:
    """Eight turns whose history has the thinking stripped: a turn computes at most the last answer, the new
    message, the generation prompt and a page."""
    core = make_core(checkpoint(family), block_size=page_size)
    messages: list[dict[str, Any]] = [{"role": "system", "content": prose(60, 0)}]
    rng = random.Random(5)
    before = 0
    for turn in range(8):
        messages.append({"role": "user", "content": prose(rng.randrange(5, 60), 100 + turn)})
        prompt, cached = ask(core, messages, tools=[WEATHER], enable_thinking=thinking)
        tail = prompt.boundaries.tail
        assert tail is not None
        if turn:
            new = len(prompt.tokens) - before  # the last answer, the new message, the generation prompt
            assert len(prompt.tokens) - cached <= new + page_size
            assert cached >= (before - page_size)
        before = tail  # what the next turn repeats
        answer = prose(rng.randrange(40, 200), 200 + turn)
        messages.append({"role": "assistant", "reasoning_content": prose(30, turn), "content": answer})


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("results", [1, 3])
def test_rounds_of_tool_calls(family: str, results: int) -> None:
    """Within a round the thinking stays in the history; the template puts the results of several calls in one
    message. When the user speaks again, all of the round is rendered anew, and what lies before it is not."""
    core = make_core(checkpoint(family))
    messages: list[dict[str, Any]] = [{"role": "user", "content": prose(80, 1)}]
    question = ask(core, messages, tools=[WEATHER])[0].boundaries.tail
    assert question is not None
    tail = question
    for step in range(3):
        call = {"function": {"name": "get_weather", "arguments": {"city": prose(6, step), "days": step}}}
        messages.append(
            {"role": "assistant", "reasoning_content": prose(9, step), "tool_calls": [call] * results}
        )
        messages += [{"role": "tool", "content": prose(40, 50 + step + i)} for i in range(results)]
        prompt, cached = ask(core, messages, tools=[WEATHER])
        assert cached >= tail - 16
        assert prompt.boundaries.tail is not None
        assert prompt.boundaries.tail > tail
        tail = prompt.boundaries.tail
        assert len(prompt.tokens) - tail == GENERATION
    messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    assert ask(core, messages, tools=[WEATHER])[1] >= question - 16


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_second_user_message_hits_system_prompt_and_tools(
    family: str, system: bool, page_size: int
) -> None:
    core = make_core(checkpoint(family), block_size=page_size)
    head = [{"role": "system", "content": prose(500, 3)}] if system else []
    tools = [WEATHER] if system else [WEATHER] * 4
    whole = encode_conversation(TEMPLATE, TOKENIZER, [*head, {"role": "user", "content": ""}], tools=tools)
    opening = TOKENIZER.token_id("<|im_start|>")
    *_, shared, _ = (i for i, token in enumerate(whole.tokens) if token == opening)
    for number in range(20):
        user = {"role": "user", "content": f"{number}. {prose(30, 400 + number)}"}
        prompt, cached = ask(core, [*head, user], tools=tools)
        if number:
            # The opening of the user's message and its number may be found as well.
            assert shared // page_size * page_size <= cached <= shared + 12
        else:
            assert cached == 0
        assert len(prompt.tokens) > shared + 20


def test_a_message_that_a_client_marks_is_hit_whatever_follows() -> None:
    core = make_core(checkpoint("qwen3_5"))
    part = {"type": "text", "text": prose(120, 7), "cache_control": {"type": "ephemeral"}}
    head = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Noted."}]
    for number in range(3):
        prompt, cached = ask(core, [*head, {"role": "user", "content": prose(80, number)}])
        marked = prompt.boundaries.marked[0]
        assert cached >= (0 if number == 0 else marked // 16 * 16)
