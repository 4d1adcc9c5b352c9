"""The largest logits of each row in one exact order, without sorting the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from plait.kernels.cpu import sampling as native

_BLOCK = 64
"""Columns whose maximum is taken first: one pass of the fastest reduction there is."""
_MOST_PADDED = 2**22
"""Entries of a padded matrix of candidates; more rows than fit are taken in parts."""


def first_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy choice: (value float32 [R], id int64 [R]) of the largest logit, the lowest id on a tie.

    A row with NaN gives NaN and some id. ``torch.max`` and ``argmax`` promise the first of equal maxima.
    """
    if native.usable(logits):
        return native.largest(logits)
    maxima = _block_maxima(logits)
    peaks, block = maxima.max(-1)
    offsets = torch.arange(_BLOCK, device=logits.device)
    columns = (block[:, None] * _BLOCK + offsets).clamp_(max=logits.shape[1] - 1)
    inside = logits.gather(1, columns).argmax(-1, keepdim=True)
    return peaks, columns.gather(1, inside)[:, 0]


def ordered_top(logits: torch.Tensor, wanted: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first entries of each row in the order (logit descending, id ascending).

    The k-th largest of the maxima of blocks is a lower bound of the k-th largest logit, so only the entries
    from there up are sorted: about k of them, unless many are equal.

    Args:
        logits: float32 [R, V] without NaN.
        wanted: R counts from 1 to V.

    Returns:
        (values float32 [R, K], ids int64 [R, K]) with K = max(wanted). Row r is right up to column
        ``wanted[r]``; what lies beyond may depend on other rows.
    """
    width = max(wanted)
    rows, ids = (logits >= _lower_bounds(logits, wanted)[:, None]).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(wanted))
    widest = max(width, int(counts.max()))
    if len(wanted) > 1 and widest * len(wanted) > _MOST_PADDED:
        half = len(wanted) // 2
        parts = [ordered_top(logits[:half], wanted[:half]), ordered_top(logits[half:], wanted[half:])]
        return _widen([part[0] for part in parts], width), _widen([part[1] for part in parts], width)

    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    padded_values = logits.new_full((len(wanted), widest), -math.inf)
    padded_ids = torch.zeros((len(wanted), widest), dtype=torch.int64, device=logits.device)
    padded_values[rows, column] = logits[rows, ids]
    padded_ids[rows, column] = ids
    values, order = padded_values.sort(dim=-1, descending=True, stable=True)  # stable: equal ones stay by id
    return values[:, :width], padded_ids.gather(1, order[:, :width])


def _block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """float32 [R, ceil(V / _BLOCK)]: the maximum of each run of columns; the last run may be short."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    parts = []
    if whole:
        parts.append(logits[:, :whole].view(len(logits), -1, _BLOCK).amax(-1))
    if whole < logits.shape[1]:
        parts.append(logits[:, whole:].amax(-1, keepdim=True))
    return torch.cat(parts, dim=-1)


def _lower_bounds(logits: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """float32 [R]: at least ``wanted[r]`` logits of row r are as large as this."""
    maxima = _block_maxima(logits)
    bounds = logits.new_full((len(wanted),), -math.inf)
    rows = [row for row, k in enumerate(wanted) if k <= maxima.shape[1]]
    if rows:
        depth = max(wanted[row] for row in rows)
        columns = torch.tensor([wanted[row] - 1 for row in rows], device=logits.device)
        deepest = maxima[rows].topk(depth).values
        bounds[rows] = deepest.gather(1, columns[:, None])[:, 0]
    return bounds


def _widen(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Rows of ``parts`` under each other, each widened to ``width`` columns that nobody reads."""
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
