"""Sampler, arena and runner on a CUDA device against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from driver import Driver, make_worker
from test_runner import assert_same, mixed
from test_sampler import logits_of, row

from plait.core.geometry import Geometry
from plait.core.plan import Kind
from plait.worker import exact
from plait.worker.arena import Arena
from plait.worker.philox import uniforms
from plait.worker.sampler import sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5},
    {"logprobs": 0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05, "temperature": 0.6},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.3, "answer": (4, 4, 9)},
    {"repetition_penalty": 1.3, "top_k": 40, "logit_bias": {7: 3.5}, "logprobs": 64},
    {"temperature": 1e-6},
]


def test_draws_and_exact_functions_have_the_same_bits() -> None:
    ids = torch.arange(5000)[None].repeat(2, 1)
    ours = uniforms([3, 2**64 - 1], [5, 2**33], ids)
    assert torch.equal(uniforms([3, 2**64 - 1], [5, 2**33], ids.cuda()).cpu(), ours)
    assert torch.equal(exact.log(ours.cuda()).cpu(), exact.log(ours))
    assert torch.equal(exact.running_sum(ours.cuda()).cpu(), exact.running_sum(ours))
    assert torch.equal(exact.exp_((-20 * ours).cuda()).cpu(), exact.exp_(-20 * ours))


@pytest.mark.parametrize("vocab", [300, 151_936])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "holes"])
def test_samples_equal_those_of_the_cpu(kind: str, vocab: int) -> None:
    logits = logits_of(kind, len(PARAMS), vocab, 1)
    rows = [row(vocab, seed=seed, **params) for seed, params in enumerate(PARAMS)]
    expected = sample(logits, rows)
    assert sample(logits.cuda(), rows) == expected
    for r in range(len(rows)):
        alone = sample(logits[r : r + 1].cuda(), rows[r : r + 1])
        assert (alone.tokens[0], alone.logprobs[0]) == (expected.tokens[r], expected.logprobs[r])


def test_bad_logits_are_named() -> None:
    logits = logits_of("normal", 3, 1000, 2)
    logits[1, 5] = float("nan")
    assert sample(logits.cuda(), [row(1000, logprobs=1)] * 3).bad == [1]


def test_arena_copies_units() -> None:
    arena = Arena(Geometry(16, 1024, 1500, 1, 1 << 20), "cuda")
    arena.state(1).fill_(3)
    arena.state(4).fill_(0)
    arena.copy(Kind.STATE, 1, 4)
    assert torch.equal(arena.state(4), arena.state(1))
    arena.close()


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("chunk", [10_000, 64])
def test_answers_equal_those_of_the_cpu(family: str, chunk: int) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        worker = make_worker(checkpoint(family), device, slabs=128, backend="reference")
        requests = mixed()
        Driver(worker).run(requests, chunk)
        answers.append(requests)
        worker.close()
    assert_same(answers[1], answers[0])
