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
        width = self._frequencies.numel()
        self._cos = torch.empty((0, width), device=device)
        self._sin = torch.empty((0, width), device=device)

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, rotary_dim / 2], for int64 positions [T], all below ``end``."""
        while self._cos.shape[0] < end:
            start = self._cos.shape[0]
            angles = torch.arange(start, start + BLOCK, dtype=torch.float32)[:, None] * self._frequencies
            self._cos = torch.cat((self._cos, angles.cos().to(self._device)))
            self._sin = torch.cat((self._sin, angles.sin().to(self._device)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
