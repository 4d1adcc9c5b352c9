"""The batched sampler against its naive twin, and what must not matter to a row."""

from __future__ import annotations

import math
from typing import Any

import naive_sampler as naive
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from plait.core.plan import Admission
from plait.core.sampling_params import SamplingParams
from plait.worker.request import RequestState, TokenCounts
from plait.worker.sampler import Row, sample
from plait.worker.top import first_largest, ordered_top

torch.set_num_threads(1)

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def row(vocab: int, *, seed: int = 0, prompt: tuple[int, ...] = (0,), answer: tuple[int, ...] = (),
        ends: tuple[int, ...] = (), position: int | None = None, **params: Any) -> Row:  # fmt: skip
    admission = Admission(
        "r", SamplingParams(**{"max_tokens": None} | params), seed, prompt + answer, len(prompt), ends
    )
    return Row(RequestState(admission, vocab), len(admission.tokens) if position is None else position)


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(rows, vocab, generator=g)
    if kind == "ties":
        x = x.round()
    if kind == "equal":
        x = torch.full_like(x, 1.5)
    if kind == "holes":
        x[torch.rand(x.shape, generator=g) < 0.5] = -math.inf
        x[:, seed % vocab] = 0.25
    return x


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Logits [R, V] and, per row, the arguments of ``row``."""
    vocab = draw(st.sampled_from([1, 3, 50, 64, 200, 300]))
    rows = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["normal", "ties", "equal", "holes"]))
    token = st.integers(0, vocab - 1)
    kwargs = {
        "seed": st.integers(-(2**63), 2**64 - 1),
        "position": st.integers(0, 2**34),
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 64, 1000]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        "logit_bias": st.one_of(st.none(), st.dictionaries(token, st.floats(-5, 5), max_size=4)),
        "prompt": st.lists(token, min_size=1, max_size=9).map(tuple),
        "answer": st.lists(token, max_size=9).map(tuple),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "ends": st.lists(token, max_size=2).map(tuple),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    }
    asked = [draw(st.fixed_dictionaries(kwargs)) for _ in range(rows)]
    return logits_of(kind, rows, vocab, draw(st.integers(0, 10**6))), asked


def by_twin(logits: np.ndarray, asked: dict[str, Any], r: Row) -> int:
    x = naive.adjusted(logits, r.request.params, list(asked["prompt"]), list(asked["answer"]), asked["ends"])
    assume(x.max() > -np.inf)
    return naive.choose(x, r.request.params, asked["seed"], r.position)


@QUICK
@given(cases())
def test_equals_the_naive_twin(case: tuple[torch.Tensor, list[dict[str, Any]]]) -> None:
    logits, asked = case
    before = logits.clone()
    rows = [row(logits.shape[1], **kwargs) for kwargs in asked]
    try:
        expected = [by_twin(x, k, r) for x, k, r in zip(logits.numpy(), asked, rows, strict=True)]
    except naive.TooClose:
        assume(False)
    samples = sample(logits, rows)
    assert samples.tokens == expected
    assert samples.bad == []
    assert torch.equal(logits, before)
    for r, (kwargs, entry) in enumerate(zip(asked, samples.logprobs, strict=True)):
        if kwargs["logprobs"] is None:
            assert entry is None
            continue
        want = naive.entry(logits[r].numpy(), expected[r], kwargs["logprobs"])
        assert [(t, rank) for t, _, rank in entry] == [(t, rank) for t, _, rank in want]
        np.testing.assert_allclose([e[1] for e in entry], [w[1] for w in want], atol=1e-10)


@QUICK
@given(cases())
def test_a_row_alone_equals_the_row_in_a_batch(case: tuple[torch.Tensor, list[dict[str, Any]]]) -> None:
    logits, asked = case
    rows = [row(logits.shape[1], **kwargs) for kwargs in asked]
    together = sample(logits, rows)
    backwards = sample(logits.flip(0), rows[::-1])
    assert (backwards.tokens[::-1], backwards.logprobs[::-1]) == (together.tokens, together.logprobs)
    for r in range(len(rows)):
        alone = sample(logits[r : r + 1].clone(), rows[r : r + 1])
        assert alone.tokens[0] == together.tokens[r]
        assert alone.logprobs[0] == together.logprobs[r]


def test_large_vocabulary_in_any_batch() -> None:
    vocab = 151_936
    logits = logits_of("normal", 8, vocab, 3)
    logits[5] = 0.0
    asked = [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"temperature": 0.0, "logprobs": 5},
             {"min_p": 0.05, "logprobs": 64}, {"top_p": 0.01}, {"top_k": 5000},
             {"top_p": 0.7, "temperature": 0.2}]  # fmt: skip
    rows = [row(vocab, seed=r, **kwargs) for r, kwargs in enumerate(asked)]
    together = sample(logits, rows)
    for r, each in enumerate(rows):
        alone = sample(logits[r : r + 1].clone(), [each])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[r], together.logprobs[r])
    for r in (1, 3, 4, 7):
        expected = naive.choose(logits[r].numpy(), rows[r].request.params, r, rows[r].position)
        assert together.tokens[r] == expected


def test_draws_do_not_depend_on_threads() -> None:
    logits = logits_of("normal", 2, 151_936, 4)
    rows = [row(151_936, top_p=0.95, logprobs=3), row(151_936, logprobs=3)]
    once = sample(logits, rows)
    torch.set_num_threads(2)
    try:
        assert sample(logits, rows) == once
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.999999}, {"top_k": 6}])
def test_draws_follow_the_softmax(params: dict[str, Any]) -> None:
    """Chi-square over positions, with one seed: 20,000 draws from six tokens."""
    logits = torch.tensor([0.0, 1.0, -0.5, 2.0, 0.3, -2.0, -math.inf])
    draws, rows = 20_000, []
    for position in range(draws):
        rows.append(Row(rows[0].request, position) if rows else row(7, seed=11, position=0, **params))
    narrow = bool(params)
    count = draws if narrow else 4_000  # rows without top-k and top-p are drawn one by one
    tokens = sample(logits.expand(count, -1), rows[:count]).tokens
    observed = np.bincount(tokens, minlength=7)[:6]
    expected = torch.softmax(logits, -1).numpy()[:6] * count
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < 20.5  # the 99.9th percentile with 5 degrees of freedom


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(2, 300)
    logits[1, 130:200] = 1.0
    assert sample(logits, [row(300, temperature=0.0)] * 2).tokens == [0, 130]
    values, ids = ordered_top(logits, [3, 72])
    assert ids[0, :3].tolist() == [0, 1, 2]
    assert ids[1].tolist() == [*range(130, 200), 0, 1]
    assert values[1].tolist() == [1.0] * 70 + [0.0] * 2
    drawn = {sample(logits[1:], [row(300, seed=s, top_k=3)]).tokens[0] for s in range(40)}
    assert drawn == {130, 131, 132}


def test_many_ties_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.cat([torch.zeros(2, 500), logits_of("normal", 3, 500, 5)])
    whole = ordered_top(logits, [4, 2, 9, 5, 1])
    monkeypatch.setattr("plait.worker.top._MOST_PADDED", 600)
    parts = ordered_top(logits, [4, 2, 9, 5, 1])
    for r, k in enumerate([4, 2, 9, 5, 1]):
        assert torch.equal(parts[0][r, :k], whole[0][r, :k])
        assert torch.equal(parts[1][r, :k], whole[1][r, :k])


def test_first_largest_in_a_short_last_block() -> None:
    for vocab in (1, 63, 64, 65, 130):
        logits = logits_of("normal", 4, vocab, vocab)
        logits[0, -1] = logits[1, 0] = 99.0
        values, ids = first_largest(logits)
        assert torch.equal(ids, logits.argmax(-1))
        assert torch.equal(values, logits.amax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = 1e4 * logits_of("normal", 1, 1000, 6)
    for params in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        samples = sample(logits, [row(1000, temperature=temperature, **params)])
        assert samples.tokens == [int(logits.argmax())]


def test_min_tokens_bars_every_end_and_only_until_then() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3], logits[0, 5], logits[0, 6] = 9.0, 8.0, 7.0
    barred = row(8, temperature=0.0, min_tokens=2, ends=(3, 99), stop_token_ids=[5], answer=(1,))
    assert sample(logits, [barred]).tokens == [6]
    barred.request.append(6)
    assert sample(logits, [barred]).tokens == [3]


def test_out_of_vocabulary_ids_touch_no_neighbour() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 0] = 1.0
    rows = [row(8, temperature=0.0, logit_bias={8: 50.0}, min_tokens=9, ends=(8,)), row(8, temperature=0.0)]
    assert sample(logits, rows).tokens == [0, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_named_and_leave_others_alone(poison: float, temperature: float) -> None:
    logits = logits_of("normal", 3, 100, 8)
    rows = [row(100, seed=r, temperature=temperature, logprobs=1) for r in range(3)]
    clean = sample(logits, rows)
    logits[1, 7 if poison != -math.inf else slice(None)] = poison
    samples = sample(logits, rows)
    assert samples.bad == [1]
    assert samples.tokens == [clean.tokens[0], None, clean.tokens[2]]
    assert samples.logprobs == [clean.logprobs[0], None, clean.logprobs[2]]


def test_nothing_left_after_the_bar_is_bad() -> None:
    logits = torch.full((1, 4), -math.inf)
    logits[0, 2] = 1.0
    samples = sample(logits, [row(4, min_tokens=1, ends=(2,))])
    assert (samples.tokens, samples.bad, samples.barred) == ([None], [], [0])


def test_counts_grow_with_the_answer() -> None:
    g = np.random.default_rng(0)
    prompt, answer = g.integers(0, 500, 300).tolist(), g.integers(0, 500, 900).tolist()
    counts = TokenCounts(prompt, answer[:10])
    for token in answer[10:]:
        counts.add(token)
    seen = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert set(seen) == set(prompt) | set(answer)
    assert all(count == answer.count(token) for token, count in seen.items())


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 with 2 rows"):
        sample(torch.zeros(1, 5), [row(5)] * 2)
    assert sample(torch.zeros(0, 5), []).tokens == []
