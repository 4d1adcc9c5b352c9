"""Seeds derived from seeds: answer ``i`` of ``n`` draws from (seed, i).

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011), in Python integers; ``plait/worker/philox.py`` is the same one in tensors.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_DOMAIN = 0x53454544
"""Last counter word of derived seeds ("SEED"): keeps them apart from the draws of the sampler."""


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit random words from four 32-bit counter words and two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def derive_seed(seed: int, index: int) -> int:
    """The seed of answer ``index`` to a request with ``seed``.

    Index 0 keeps the seed itself, so that one answer alone equals the first of many. Any other gives
    an integer of 64 bits. A negative seed counts as its two's complement in 64 bits.

    Raises:
        ValueError: an index outside 0 .. 2**32 - 1.
    """
    if not 0 <= index <= _MASK:
        raise ValueError(f"index={index}: it must be from 0 to {_MASK}")
    if index == 0:
        return seed
    low, high, _, _ = philox((index, 0, 0, _DOMAIN), (seed & _MASK, seed >> 32 & _MASK))
    return low | high << 32
