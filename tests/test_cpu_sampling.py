"""Native passes over the vocabulary against the torch operations that they stand in for: the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from plait.core.plan import Admission
from plait.core.sampling_params import SamplingParams
from plait.kernels.cpu import sampling
from plait.kernels.cpu.native import MISSING, native
from plait.worker import exact
from plait.worker.request import RequestState
from plait.worker.sampler import Row, sample
from plait.worker.top import first_largest

pytestmark = pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}")

ISAS = native.isas() if native else []


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set, with two threads."""
    before = native.isa()
    native.use_isa(request.param)
    native.set_threads(2)
    yield request.param
    native.set_threads(1)
    native.use_isa(before)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """While entered as a context, ``plait.worker`` uses torch alone."""
    with monkeypatch.context() as patch:
        yield patch


def rows_of(spread: float, vocab: int) -> torch.Tensor:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[1, : vocab // 2] = -math.inf
    logits[2] = 1.25
    logits[3] += torch.linspace(-900, 0, vocab)
    return logits


@pytest.mark.parametrize("vocab", [1, 7, 997, 16384, 16385, 50_001])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_sums(isa: str, vocab: int, spread: float, by_torch: pytest.MonkeyPatch) -> None:
    logits = rows_of(spread, vocab)
    peaks = logits.amax(-1).double()
    temperatures = torch.tensor([1.0, 0.7, 1e-3, 3.3, 50.0], dtype=torch.float64)
    ours = sampling.sum_exp(logits, peaks, temperatures)
    by_torch.setattr(sampling, "usable", lambda logits: False)
    theirs = exact.sum_exp(logits, peaks, temperatures)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1023, 1024, 1025, 5000])
def test_the_first_of_the_largest(isa: str, vocab: int, by_torch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=g)
    places = torch.randint(vocab, (40, 3), generator=g)
    logits.scatter_(1, places, 9.0)  # up to three equal ones
    logits[0], logits[1], logits[2], logits[3] = -math.inf, 0.0, -0.0, -3.0
    logits[2, vocab // 2] = 0.0  # equal to its neighbours
    logits[4, places[4, 0]] = math.inf
    peaks, ids = first_largest(logits)
    by_torch.setattr(sampling, "usable", lambda logits: False)
    torch_peaks, torch_ids = first_largest(logits)
    assert torch.equal(peaks, torch_peaks)
    assert torch.equal(ids, torch_ids)
    assert vocab < 1000 or len(set(ids.tolist())) > 20


def test_rows_with_nan_have_no_largest(isa: str) -> None:
    for place in range(0, 1100, 7):
        logits = torch.zeros(3, 1100)
        logits[1, place] = math.nan
        logits[1, (place + 500) % 1100] = math.inf
        peaks, ids = first_largest(logits)
        assert peaks.isnan().tolist() == [False, True, False]
        assert 0 <= int(ids[1]) < 1100


@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("vocab", [1, 600, 40_000])
@pytest.mark.parametrize("spread", [0.0, 2.0, 8.0])
def test_draws(isa: str, vocab: int, spread: float, min_p: float, by_torch: pytest.MonkeyPatch) -> None:
    logits = rows_of(spread, vocab).repeat(4, 1)
    params = SamplingParams(temperature=0.9, min_p=min_p)
    rows = [
        Row(RequestState(Admission(str(r), params, seed, (1, 2), 2), vocab), position)
        for r, (seed, position) in enumerate(zip(range(-9, 11), range(2, 2**33, 2**33 // 20), strict=False))
    ]
    ours = sample(logits, rows).tokens
    by_torch.setattr(sampling, "usable", lambda logits: False)
    assert ours == sample(logits, rows).tokens
    if vocab > 1 and not min_p:
        assert len(set(ours)) > 5


def test_log_probabilities_use_the_sums(isa: str, by_torch: pytest.MonkeyPatch) -> None:
    logits = rows_of(3.0, 20_000)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3)
    rows = [Row(RequestState(Admission(str(r), params, r, (1, 2), 2), 20_000), 9) for r in range(len(logits))]
    ours = sample(logits, rows)
    by_torch.setattr(sampling, "usable", lambda logits: False)
    theirs = sample(logits, rows)
    assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)
