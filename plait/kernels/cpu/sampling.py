"""Passes over whole rows of logits for the sampler: the bits of the torch operations, in one pass."""

from __future__ import annotations

import torch

from plait.kernels.cpu.native import native


def usable(logits: torch.Tensor) -> bool:
    """Whether these kernels can work on ``logits``, [R, V] or [V]."""
    return (
        native is not None
        and logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.is_contiguous()
    )


def sum_exp(logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """As ``plait.worker.exact.sum_exp``."""
    rows, vocab = logits.shape
    peaks, temperatures = peaks.contiguous(), temperatures.contiguous()
    assert peaks.dtype == temperatures.dtype == torch.float64
    assert peaks.shape == temperatures.shape == (rows,)
    sums = torch.empty(rows, dtype=torch.float64)
    addresses = (tensor.data_ptr() for tensor in (peaks, temperatures, sums))
    native.sum_exp(logits.data_ptr(), rows, vocab, *addresses)
    return sums


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``plait.worker.top.first_largest``."""
    rows, vocab = logits.shape
    peaks, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    native.largest(logits.data_ptr(), rows, vocab, peaks.data_ptr(), ids.data_ptr())
    return peaks, ids


def draw(
    logits: torch.Tensor, *, peak: float, temperature: float, floor: float, seed: int, position: int
) -> int:
    """The token of the largest scaled logit plus noise, the lowest of equal ones.

    Args:
        logits: float32 [V], the largest of them ``peak``.
        temperature: divides ``logit - peak``, which gives the scaled logit.
        floor: tokens whose scaled logit lies below it are left out; at most 0.
        seed: of 64 bits; a negative one wraps.
        position: of the token in its request.
    """
    return int(
        native.draw(
            logits.data_ptr(), logits.numel(), peak, temperature, floor, seed & 0xFFFFFFFFFFFFFFFF, position
        )
    )
