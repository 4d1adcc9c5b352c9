"""Cosines and sines of rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

import math

import torch

from plait.models.config import RopeConfig

BLOCK = 4096
"""Positions tabulated at once. Blocks start at multiples of it, so that an entry never depends on when it
was asked for: vectorised cosines may differ in the last bit between one shape and another."""


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position, float32 [rotary_dim / 2].

    ``llama3``: wavelengths above original / low_freq_factor are stretched by ``factor``, those below
    original / high_freq_factor are kept, and between them the two are blended (Llama 3.1 model card code).
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "default":
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies


class RotaryTable:
    """Rows of cos and sin by position, tabulated as positions come up."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope)
        self._device = device
        self._table = torch.empty((2, 0, self._frequencies.numel()), device=device)  # cos, sin

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, rotary_dim / 2], for int64 positions [T], all below ``end``."""
        while (start := self._table.shape[1]) < end:
            angles = torch.arange(start, start + BLOCK, dtype=torch.float32)[:, None] * self._frequencies
            block = torch.stack((angles.cos(), angles.sin())).to(self._device)
            self._table = torch.cat((self._table, block), dim=1)
        cos, sin = self._table.index_select(1, positions)
        return cos, sin
