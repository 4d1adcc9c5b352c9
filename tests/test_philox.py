"""Philox against published vectors; derived seeds; the functions with fixed bits."""

import math

import pytest
import torch

from plait.core import seeds
from plait.worker import exact
from plait.worker.philox import philox, uniforms

torch.set_num_threads(1)

# Known answers for philox4x32-10 from the Random123 distribution of the paper's authors.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert seeds.philox(words(counter), words(key)) == words(answer)
    drawn = philox(torch.tensor(words(counter)), torch.tensor(words(key)))
    assert tuple(int(word) for word in drawn) == words(answer)


def test_tensor_twin_equals_integer_twin() -> None:
    g = torch.Generator().manual_seed(1)
    columns = torch.randint(0, 2**32, (6, 50), generator=g)
    drawn = torch.stack([torch.as_tensor(w) for w in philox(columns[:4], columns[4:])])
    for i in range(columns.shape[1]):
        column = columns[:, i].tolist()
        assert seeds.philox(tuple(column[:4]), tuple(column[4:])) == tuple(drawn[:, i].tolist())


def test_uniforms_are_keyed_by_seed_position_and_token() -> None:
    ids = torch.arange(1000)[None].repeat(3, 1)
    drawn = uniforms([7, 7, 2**64 - 1], [0, 2**32, 0], ids)
    assert drawn.dtype == torch.float64
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert len(drawn.unique()) == 3000
    shuffled = torch.randperm(1000)
    again = uniforms([-1], [0], ids[:1, shuffled])  # a negative seed is its two's complement
    assert torch.equal(again[0], drawn[2, shuffled])
    assert abs(drawn.mean() - 0.5) < 0.02


def test_derived_seeds() -> None:
    assert seeds.derive_seed(123, 0) == 123
    derived = [seeds.derive_seed(seed, i) for seed in (0, 1, 2**63, 2**64 - 1) for i in range(1, 50)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**64 for seed in derived)
    assert seeds.derive_seed(-1, 3) == seeds.derive_seed(2**64 - 1, 3)
    counter = [torch.tensor(word) for word in (3, 0, 0, 0x53454544)]
    low, high, _, _ = philox(counter, (5, 1))
    assert seeds.derive_seed(5 + 2**32, 3) == int(low) | int(high) << 32
    with pytest.raises(ValueError, match="index=-1"):
        seeds.derive_seed(1, -1)


def test_exp_and_log_are_accurate() -> None:
    x = -torch.cat([torch.linspace(0, 5, 5001), torch.linspace(5, 690, 5001)]).double()
    assert torch.allclose(exact.exp_(x.clone()), x.exp(), rtol=1e-15, atol=0)
    assert exact.exp_(torch.tensor([0.0], dtype=torch.float64)).item() == 1.0
    assert exact.exp_(torch.tensor([-math.inf], dtype=torch.float64)).item() < 1e-300
    tails = torch.tensor([2.0**-53, 1 - 2.0**-53, 53 * math.log(2)], dtype=torch.float64)
    y = torch.cat([torch.logspace(-300, 300, 20001, dtype=torch.float64), tails])
    assert torch.allclose(exact.log(y), y.log(), rtol=1e-15, atol=0)


def test_sums_do_not_depend_on_what_follows_or_stands_beside() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.rand(3, 1000, generator=g, dtype=torch.float64)
    sums = exact.running_sum(x)
    assert torch.allclose(sums, x.cumsum(-1), rtol=1e-13)
    for width in (1, 2, 7, 513):
        assert torch.equal(exact.running_sum(x[:, :width]), sums[:, :width])
    logits = 5 * torch.randn(3, 40_001, generator=g)
    peaks = logits.amax(-1).double()
    temperatures = torch.tensor([1.0, 0.7, 3.0], dtype=torch.float64)
    totals = exact.sum_exp(logits, peaks, temperatures)
    expected = ((logits.double() - peaks[:, None]) / temperatures[:, None]).exp().sum(-1)
    assert torch.allclose(totals, expected, rtol=1e-13)
    for r in range(3):
        alone = exact.sum_exp(logits[r : r + 1], peaks[r : r + 1], temperatures[r : r + 1])
        assert torch.equal(alone[0], totals[r])
