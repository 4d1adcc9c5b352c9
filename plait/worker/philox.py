"""Counter-based random numbers: Philox-4x32-10 in tensors of any device.

Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw is a
pure function of a key and a counter, so it needs no generator state and does not depend on which
draws were made before it or beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Word = torch.Tensor | int
"""A 32-bit word: int64 tensor with values from 0 to 2**32 - 1, or a Python integer."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_DOMAIN = 0x544F4B4E
"""Last counter word of token draws ("TOKN"): keeps them apart from derived seeds (plait/core/seeds.py)."""


def philox(counter: Sequence[Word], key: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Four random words from four counter words and two key words, all broadcast together.

    A 32 x 32-bit product needs 64 bits; as int64 it may wrap, but its bits are right, and masking
    after each shift removes the copies of the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & _MASK, ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def words(values: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high) 32-bit words of 64-bit integers, each int64 [len(values), 1]; negative ones wrap."""
    low_high = [[v & _MASK for v in values], [v >> 32 & _MASK for v in values]]
    low, high = torch.tensor(low_high, dtype=torch.int64).to(device).unsqueeze(-1)
    return low, high


def uniforms(seeds: Sequence[int], positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """One uniform draw per (seed, position, token id).

    Args:
        seeds: R seeds of 64 bits.
        positions: R positions in the request's tokens, from 0 up.
        token_ids: int64 [R, C].

    Returns:
        float64 [R, C]: odd multiples of 2**-53, so that 0 < u < 1 and both u and 1 - u are exact.
    """
    key = words(seeds, token_ids.device)
    position = words(positions, token_ids.device)
    first, second, _, _ = philox((token_ids, *position, _DOMAIN), key)
    bits = torch.as_tensor((first << 21) | (second >> 11) | 1)
    return bits.to(torch.float64) * 2.0**-53
