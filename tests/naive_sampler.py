"""The sampler said plainly: one row at a time, whole sorts, float64; the twin the tests compare with."""

from __future__ import annotations

import math

import numpy as np

from plait.core.sampling_params import SamplingParams
from plait.core.seeds import philox

CLOSE = 1e-10
"""Two quantities nearer than this may be ordered otherwise by other roundings."""


class TooClose(Exception):
    """The answer hangs on a rounding: nothing to compare."""


def gumbel(seed: int, position: int, token: int) -> float:
    seed %= 2**64
    counter = (token, position % 2**32, position >> 32, 0x544F4B4E)
    first, second, _, _ = philox(counter, (seed % 2**32, seed >> 32))
    return -math.log(-math.log(((first << 21 | second >> 11) | 1) / 2**53))


def adjusted(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], ends: tuple[int, ...]
) -> np.ndarray:
    """float32 [V]: bias, penalties, bar on end tokens; every operation rounded to float32."""
    x = logits.astype(np.float32).copy()
    for token, bias in (params.logit_bias or {}).items():
        if token < len(x):
            x[token] += np.float32(bias)
    for token in set(prompt) | set(answer):
        repetition = np.float32(params.repetition_penalty)
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        count = np.float32(answer.count(token))
        x[token] -= np.float32(params.frequency_penalty) * count
        x[token] -= np.float32(params.presence_penalty) * np.float32(count > 0)
    if len(answer) < params.min_tokens:
        for token in {*ends, *params.stop_token_ids}:
            if token < len(x):
                x[token] = -np.inf
    return x


def kept_tokens(x: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that survive top-k, top-p and min-p, in the order (logit descending, id ascending)."""
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if 0 < params.top_k < len(x):
        order = order[: params.top_k]
    order = [token for token in order if x[token] > -np.inf]
    scaled = (x[order].astype(np.float64) - float(x[order[0]])) / params.temperature
    weights = np.exp(scaled)
    kept = []
    before, mass = 0.0, params.top_p * math.fsum(weights)
    for token, z, weight in zip(order, scaled, weights, strict=True):
        if params.top_p < 1:
            if before != mass and abs(before - mass) < CLOSE * mass:
                raise TooClose
            if before >= mass:
                break
        if params.min_p:
            if z != math.log(params.min_p) and abs(z - math.log(params.min_p)) < CLOSE:
                raise TooClose
            if z < math.log(params.min_p):
                break
        kept.append(token)
        before += weight
    return kept


def choose(x: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
    """The token drawn from adjusted logits."""
    if params.greedy:
        return int(np.argmax(x))
    peak = float(x.max())
    kept = kept_tokens(x, params)
    scores = sorted(((float(x[t]) - peak) / params.temperature + gumbel(seed, position, t), t) for t in kept)
    if len(scores) > 1 and scores[-1][0] - scores[-2][0] < CLOSE:
        raise TooClose
    return scores[-1][1]


def entry(logits: np.ndarray, token: int, count: int) -> list[tuple[int, float, int]]:
    """``TokenLogprobs`` of one row of raw logits."""
    x = logits.astype(np.float64)
    logprobs = x - x.max() - math.log(math.fsum(np.exp(x - x.max())))
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))[:count]
    return [(t, float(logprobs[t]), 1 + int((x > x[t]).sum())) for t in [token, *order]]
