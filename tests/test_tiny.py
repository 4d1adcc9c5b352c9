"""plait-tiny, the hybrid that comes with plait: it answers as well as its card says, its answers are the same
however they are scheduled, and faults planted in states and pages show as wrong answers."""

from __future__ import annotations

import functools
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from offline import Answer, make_core, run
from planted import FAULTS
from reading import read_answer
from transformers import AutoModelForCausalLM

from plait.core.sampling_params import SamplingParams
from plait.engine.core import EngineCore
from plait.eval.kinds import KINDS
from plait.eval.question import Question, Said, held_out
from plait.eval.statistics import Paired
from plait.kernels.cpu.native import MISSING, native
from plait.models.hub import resolve_model
from plait.text.chat import ChatTemplate
from plait.text.parsing import OutputFormat
from plait.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=64, logprobs=0)
STATEFUL = ("track", "words", "talk")
"""Kinds whose answers go through states."""

MINIMA = "0.92,codes=0.85,codes-long=0.85,track=0.5,calls=0.85,copy=0.75,sort=0.75"

needs_kernels = pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}")


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("plait-tiny")


class Gate:
    """Questions as prompts, and answers as what was said."""

    def __init__(self, folder: Path, kinds: Sequence[str], items: int) -> None:
        self.folder = folder
        self.questions = [question for kind in kinds for question in held_out(kind, items)]
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.of(self._tokenizer)
        self._form = OutputFormat(self._tokenizer, self._template.source)
        self._texts = [self._template.render(q.messages, tools=q.tools) for q in self.questions]
        self.prompts = [self._tokenizer.encode_chat(text) for text in self._texts]

    def answers(
        self, core: EngineCore, order: Sequence[int] | None = None, at_once: int = 10**9
    ) -> list[Answer]:
        """In the order of the questions, asked in ``order``."""
        order = range(len(self.prompts)) if order is None else order
        asked = run(core, [self.prompts[i] for i in order], GREEDY, at_once=at_once, check_every=200)
        by_question = dict(zip(order, asked, strict=True))
        return [by_question[i] for i in range(len(self.prompts))]

    def right(self, answers: Sequence[Answer]) -> list[bool]:
        return [
            question.right(self._said(question, text, answer))
            for question, text, answer in zip(self.questions, self._texts, answers, strict=True)
        ]

    def _said(self, question: Question, prompt: str, answer: Answer) -> Said:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in question.tools}
        return read_answer(self._tokenizer, self._form.parser(prompt, schemas), answer.tokens)


@pytest.fixture(scope="module")
def gate(folder: Path) -> Gate:
    return Gate(folder, tuple(KINDS), 2)


@needs_kernels
def test_it_answers_as_well_as_its_card_says():
    """The gate that guards plait's own changes: the card's figures, less what 100 questions may vary by."""
    command = [sys.executable, "-m", "plait", "eval", "plait-tiny", "--items", "100", "--min", MINIMA]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_kernels
def test_transformers_gives_the_same_answers(folder: Path, gate: Gate):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(gate.prompts, alone(gate), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.tokens


def told(answers: Sequence[Answer]) -> list[tuple[list[int], list[object], str | None]]:
    return [(answer.tokens, answer.logprobs, answer.finish_reason) for answer in answers]


@functools.cache
def alone(gate: Gate) -> list[Answer]:
    """One at a time, whole prompts, nothing cached."""
    core = make_core(gate.folder, enable_prefix_caching=False)
    found = gate.answers(core, at_once=1)
    core.close()
    assert all(answer.failed is None and answer.tokens for answer in found)
    return found


def check_same(gate: Gate) -> None:
    """Budgets, company, cache and preemption, each against answers given alone."""
    expected = told(alone(gate))
    order = Random(4).sample(range(len(gate.prompts)), len(gate.prompts))
    for budget in (64, 2048):
        for at_once in (1, 32):
            core = make_core(gate.folder, max_num_batched_tokens=budget, max_num_seqs=32)
            assert told(gate.answers(core, order, at_once)) == expected, (budget, at_once)
            warm = gate.answers(core, at_once=at_once)
            assert told(warm) == expected, ("warm", budget, at_once)
            assert sum(answer.num_cached_tokens for answer in warm) > 0
            core.close()


@needs_kernels
def test_answers_are_the_same_at_any_budget_in_any_company_and_with_any_cache(gate: Gate):
    check_same(gate)


@needs_kernels
@pytest.mark.parametrize("swap", [0, 8], ids=["recompute", "swap"])
def test_answers_are_the_same_after_preemption(folder: Path, swap: int):
    """Short prompts whose answers outgrow the arena."""
    gate = Gate(folder, ("sums", "calls", "calls-text"), 10)
    geometry = make_core(gate.folder).scheduler.cache.geometry
    longest = max(map(len, gate.prompts)) + GREEDY.max_tokens
    slabs = geometry.slabs_for(longest) + geometry.slabs_for(60)
    settings = {"preemption_mode": "swap", "swap_slabs": swap} if swap else {}
    core = make_core(gate.folder, slabs=slabs, max_num_batched_tokens=128, **settings)
    assert told(gate.answers(core)) == told(alone(gate))
    assert core.scheduler.counters.preemptions > 0
    core.close()


def handed_over(gate: Gate) -> list[Answer]:
    """One engine computes the prompts, another answers them."""
    config = {"kv_connector": "LoopbackConnector", "kv_role": "kv_both"}
    prefiller, decoder = (
        make_core(gate.folder, kv_transfer_config=config, max_num_batched_tokens=budget)
        for budget in (100, 70)
    )
    answers = [Answer() for _ in gate.prompts]

    def add(core: EngineCore, number: int, transfer: dict[str, Any]) -> None:
        core.add(
            str(number), gate.prompts[number], GREEDY, seed=0, max_tokens=GREEDY.max_tokens,
            kv_transfer_params=transfer,
        )  # fmt: skip

    for number in range(len(answers)):
        add(prefiller, number, {"do_remote_decode": True})
    while not all(answer.finish_reason for answer in answers):
        computed, answered = prefiller.step(), decoder.step()
        assert not computed.failed
        assert not answered.failed
        for progress in computed.progress:
            if (reply := prefiller.reply(progress)) is not None:
                add(decoder, int(progress.request_id), reply)
        for progress in answered.progress:
            answer = answers[int(progress.request_id)]
            answer.tokens += progress.tokens
            answer.logprobs += progress.logprobs
            answer.finish_reason = progress.finish_reason
        if computed.idle and answered.idle:
            engines = (prefiller, decoder)
            woken = [engine.wake_descriptor for engine in engines]
            select.select(woken, [], [], min(engine.patience(1.0) for engine in engines))
    assert decoder.scheduler.handover is not None
    assert decoder.scheduler.handover.counters.received == len(answers)
    for engine in (decoder, prefiller):
        engine.close()
    return answers


@needs_kernels
def test_answers_are_the_same_after_hand_over(gate: Gate):
    assert told(handed_over(gate)) == told(alone(gate))


# -- faults -------------------------------------------------------------------------------------


def planted(gate: Gate, fault: str | None) -> list[Answer]:
    """Answers at small chunks, a few requests at a time, with a fault or without."""
    core = make_core(
        gate.folder, enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=4,
        async_scheduling=False,
    )  # fmt: skip
    harmful = FAULTS[fault](core) if fault else None
    found = gate.answers(core, at_once=4)
    if harmful is not None:
        assert harmful.harm > len(gate.prompts) // 4
    core.close()
    return found


@functools.cache
def sound_answers(folder: Path) -> tuple[Gate, list[Answer]]:
    """Of an engine without a fault, twice the same."""
    gate = Gate(folder, ("track", "talk", "codes"), 32)
    sound = planted(gate, None)
    assert [answer.tokens for answer in sound] == [answer.tokens for answer in planted(gate, None)]
    return gate, sound


@needs_kernels
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_answers(folder: Path, fault: str):
    """Against the answers of a sound engine, which stay as they are."""
    gate, sound = sound_answers(folder)
    harmed = planted(gate, fault)
    same = [a.tokens == b.tokens for a, b in zip(sound, harmed, strict=True)]
    assert len({token for answer in sound for token in answer.tokens}) > 50  # they say something
    assert Paired.of([True] * len(same), same).p < 0.001, (
        f"{same.count(False)} of {len(same)} answers changed"
    )


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_gate(folder: Path, fault: str):
    """Held-out questions show it as wrong answers, in all kinds together and in one that needs states."""
    gate = Gate(folder, STATEFUL, 150)
    sound, harmed = gate.right(planted(gate, None)), gate.right(planted(gate, fault))
    pair = Paired.of(sound, harmed)
    assert pair.p < 0.001, pair
    assert pair.difference < 0, pair


@needs_kernels
def test_attention_alone_cannot_answer(folder: Path):
    """Without what states carry from chunk to chunk; so a fault in them cannot be made up for."""
    gate = Gate(folder, ("track",), 30)
    assert sum(gate.right(planted(gate, None))) > 15
    assert sum(gate.right(planted(gate, "no state"))) <= 1


@pytest.mark.slow
@needs_kernels
def test_many_answers_are_the_same(folder: Path):
    check_same(Gate(folder, tuple(KINDS), 50))
