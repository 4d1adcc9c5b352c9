"""Functions of float64 whose bits are the same everywhere.

``torch.exp``, ``torch.log`` and ``torch.sum`` may round differently from one library, device,
alignment or number of threads to the next. IEEE 754 fixes +, -, * and / to the last bit, so what is built
from these alone, each in a kernel of its own and in one fixed order, does not. Sampling decides by
comparing such numbers, and an answer must not depend on what ran beside it.
"""

from __future__ import annotations

import math

import torch

from plait.kernels.cpu import sampling as native

_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
"""ln 2 rounded to 32 bits: times an integer below 2**20 it is exact."""
_LN2_LOW = 1.9082149292705877e-10
"""ln 2 less the above."""
_EXP_FLOOR = -700.0
"""exp stays at about 1e-304 from here down, which vanishes beside the largest weight of a row, 1."""
_EXP_TERMS = [1 / math.factorial(n) for n in range(12, -1, -1)]
_LOG_TERMS = [1 / (2 * n + 1) for n in range(11, -1, -1)]
_BLOCK = 16384
"""Columns of a block: its float64 scratch stays in a core's second-level cache."""


def exp_(x: torch.Tensor) -> torch.Tensor:
    """exp of ``x`` <= 0, in place; float64 of any shape, relative error below 1e-15.

    x = k ln 2 + r with \\|r\\| <= ln 2 / 2; Taylor series of degree 12 for exp(r), scaled by 2**k.
    """
    x.clamp_(min=_EXP_FLOOR)
    power = torch.mul(x, 1 / math.log(2.0)).round_()
    x.sub_(power * _LN2_HIGH).sub_(power * _LN2_LOW)
    series = torch.full_like(x, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series.mul_(x).add_(term)
    scale = power.to(torch.int64).add_(1023).bitwise_left_shift_(52).view(torch.float64)
    return torch.mul(series, scale, out=x)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64 values of any shape, relative error below 1e-15.

    x = 2**k m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series.
    """
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    power = (exponent - low.to(exponent.dtype)).to(torch.float64)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        series = series * square + term
    return power * _LN2_HIGH + (power * _LN2_LOW + 2 * s * series)


def running_sum(x: torch.Tensor) -> torch.Tensor:
    """Inclusive sums along the last axis of float64 [R, C], by doubling strides (Hillis, Steele 1986).

    Column c depends on columns 0 .. c alone, whatever C is, so padding at the end changes nothing.
    """
    total, stride = x, 1
    while stride < x.shape[-1]:
        total = torch.cat([total[:, :stride], total[:, stride:] + total[:, :-stride]], dim=-1)
        stride *= 2
    return total


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis of float64 [R, 2**n], by folding halves; ``x`` is overwritten."""
    width = x.shape[-1]
    while width > 1:
        width //= 2
        x[:, :width].add_(x[:, width : 2 * width])
    return x[:, 0]


def sum_exp(logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """sum over v of exp((logits[r, v] - peaks[r]) / temperatures[r]).

    Args:
        logits: float32 [R, V].
        peaks: float64 [R], the largest logit of each row.
        temperatures: float64 [R].

    Returns:
        float64 [R]. Blocks of columns are summed as trees, then added from left to right.
    """
    if native.usable(logits):
        return native.sum_exp(logits, peaks, temperatures)
    rows, vocab = logits.shape
    if rows > 1 and logits.device.type == "cpu":  # row by row the scratch stays in cache
        parts = [slice(row, row + 1) for row in range(rows)]
        return torch.cat([sum_exp(logits[part], peaks[part], temperatures[part]) for part in parts])
    total = torch.zeros(rows, dtype=torch.float64, device=logits.device)
    scratch = torch.empty(rows, _BLOCK, dtype=torch.float64, device=logits.device)
    for start in range(0, vocab, _BLOCK):
        block = logits[:, start : start + _BLOCK]
        scratch[:, : block.shape[1]].copy_(block)
        scratch[:, block.shape[1] :].fill_(-math.inf)
        scratch.sub_(peaks[:, None]).div_(temperatures[:, None])
        total = total + tree_sum(exp_(scratch))
    return total
