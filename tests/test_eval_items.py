"""Held-out questions: apart from training text by construction, the same each time, and answerable."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.eval.conversation import Conversation, size
from plait.eval.draw import Draw
from plait.eval.kinds import KINDS, questions
from plait.eval.split import held_out, held_out_of
from plait.eval.tasks import calls, recall, talk
from plait.eval.words import KINDS as WORDS
from plait.eval.words import PLACES
from tools.train_tiny.stages import STAGES, TASKS, draw_conversation
from tools.train_tiny.text import render

DOCUMENTS = 1500


@pytest.fixture(scope="module")
def training_text() -> str:
    """Documents of every task, and of every stage with its own mixture."""
    random = Random(99)
    made = [TASKS[name](Draw(random, held=False), 256) for name in TASKS for _ in range(DOCUMENTS // 10)]
    made += [draw_conversation(random, stage) for stage in STAGES for _ in range(DOCUMENTS // 5)]
    return "\n".join(map(render, made))


def claims(kind: str, chat: Conversation) -> Iterator[str]:
    """What a question of this kind is about, as text that training must not have."""
    answer = chat.answer
    if "tool_calls" in answer:
        function = answer["tool_calls"][0]["function"]
        text = function["arguments"].get("text")
        if text is not None:
            yield f"\n{text}\n"
            return
        lines = (f"<parameter={key}>\n{value}\n" for key, value in function["arguments"].items())
        yield f"<function={function['name']}>\n" + "</parameter>\n".join(lines)
    elif kind == "results":
        yield from claims("calls", Conversation(chat.messages[:2]))
    elif kind in ("sort", "copy"):
        yield chat.prompt[-1]["content"] + "<"
    elif kind == "track":
        name, place = re.fullmatch(r"(\w+) is in the (\w+)\.", answer["content"]).groups()
        yield f"{name} goes to the {place}."
    elif kind == "sums":
        a, b = re.match(r"(\d+) \+ (\d+)", answer["content"]).groups()
        yield from (f"{x} {sign} {y}?" for x, y in ((a, b), (b, a)) for sign in ("+", "plus"))
    elif code := re.search(r"\d{4}", answer["content"]):
        yield code[0]
    else:
        said = answer["content"]
        yield "y" + said[1:] if said.startswith("Your") else said


@pytest.mark.parametrize("kind", KINDS)
def test_no_held_out_item_occurs_in_training_text(kind: str, training_text: str):
    asked = questions(kind, 500)
    for chat in asked:
        for claim in claims(kind, chat):
            assert claim not in training_text


def test_the_text_is_searched_for_what_it_would_show(training_text: str):
    """The same claims, made of training items, are found: the test above can fail."""
    random = Random(5)
    for kind in ("words", "codes", "track", "talk", "calls", "results", "sums", "sort"):
        made = [KINDS[kind].draw(Draw(random, held=False)) for _ in range(300)]
        found = [claim in training_text for chat in made for claim in claims(kind, chat)]
        assert any(found), kind


def test_words_are_split_with_some_on_both_sides():
    for kind, words in {**WORDS, "place": PLACES}.items():
        for owner in ("Anna", "Zoe"):
            apart = held_out_of(words, (kind, owner))
            assert 1 <= len(apart) <= len(words) // 5
    sums = [held_out("sum", str(a), str(b)) for a, b in itertools.product(range(10, 100), repeat=2)]
    assert 0.08 < sum(sums) / len(sums) < 0.12


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(KINDS)))
def test_questions_are_the_same_for_a_seed_and_can_be_answered(seed: int, kind: str):
    [first], [again] = questions(kind, 1, seed), questions(kind, 1, seed)
    assert first == again
    assert first.answer["role"] == "assistant"
    assert json.loads(json.dumps(first.messages)) == first.messages
    text = first.prompt[-1]["content"] if kind != "talk" else " ".join(m["content"] for m in first.prompt)
    if kind in ("words", "codes", "codes-long"):
        assert first.answer["content"] in text
    elif kind == "copy":
        assert text.endswith(first.answer["content"])
    elif kind.startswith("calls"):
        names = [tool["function"]["name"] for tool in first.tools]
        function = first.answer["tool_calls"][0]["function"]
        assert names.count(function["name"]) == 1
        assert all(str(value) in text for value in function["arguments"].values())


@settings(deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_a_conversation_has_one_answer_to_its_question(seed: int, held: bool):
    chat = talk.talk(Draw(Random(seed), held), 300)
    asked = chat.prompt[-1]["content"]
    answers = {
        b["content"]
        for a, b in itertools.pairwise(chat.messages)
        if a["content"] == asked and b["role"] == "assistant"
    }
    assert answers == {chat.answer["content"]}
    value = chat.answer["content"].removesuffix(".").split()[-1]
    assert any(value in message["content"] for message in chat.prompt)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_the_last_move_of_a_person_is_the_answer(seed: int, held: bool, people: int):
    chat = recall.track(Draw(Random(seed), held), 200, people)
    text = chat.prompt[0]["content"]
    asked = re.search(r"Where is (\w+)\?", text)[1]
    places = re.findall(rf"{asked} goes to the (\w+)\.", text)
    assert chat.answer["content"] == f"{asked} is in the {places[-1]}."


def test_questions_have_about_the_length_they_say():
    for kind, most in (("words", 500), ("codes", 200), ("codes-long", 500), ("track", 250), ("talk", 400)):
        texts = [re.sub(r"<\|?/?\w+\|?>", " T ", render(chat)) for chat in questions(kind, 100)]
        lengths = [size(text) for text in texts]
        assert most * 0.7 < max(lengths) < most * 1.15, (kind, max(lengths))


def test_tools_are_offered_with_their_schemas():
    chat = calls.call(Draw(Random(1), held=True), calls.SHORT)
    schema = chat.tools[0]["function"]["parameters"]
    assert set(schema["required"]) == set(schema["properties"])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no kind 'poems'; the kinds are words"):
        questions("poems", 1)
