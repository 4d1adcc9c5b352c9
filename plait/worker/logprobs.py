"""Log-probabilities from the raw logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from plait.core.plan import TokenLogprobs
from plait.worker.exact import log, sum_exp
from plait.worker.top import ordered_top

_ROWS = 32
"""Rows taken at once: bounds the temporaries of a long prompt's log-probabilities."""


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-softmax, in float64, of each row's token and of its most likely alternatives.

    Args:
        logits: float32 [R, V], as the model gave them; the largest of each row is finite.
        tokens: the R actual tokens.
        alternatives: how many alternatives each row reports, from 0 up.

    Returns:
        R entries as described at ``TokenLogprobs``.
    """
    if len(tokens) > _ROWS:
        starts = range(0, len(tokens), _ROWS)
        parts = [slice(start, start + _ROWS) for start in starts]
        return [e for p in parts for e in token_logprobs(logits[p], tokens[p], alternatives[p])]
    peaks = logits.amax(-1).to(torch.float64)
    log_totals = log(sum_exp(logits, peaks, torch.ones_like(peaks)))
    wanted = [min(max(count, 1), logits.shape[1]) for count in alternatives]
    top_values, top_ids = ordered_top(logits, wanted)
    own_ids = torch.tensor(tokens, device=logits.device)[:, None]
    own_values = logits.gather(1, own_ids)
    ranks = torch.count_nonzero(logits > own_values, dim=-1) + 1

    values = torch.cat([own_values, top_values], dim=-1).to(torch.float64)
    logprobs = ((values - peaks[:, None]) - log_totals[:, None]).tolist()
    top_ranks = (top_values[:, None, :] < top_values[:, :, None]).sum(1) + 1  # equal ones share a rank
    ids = torch.cat([own_ids, top_ids], dim=-1).tolist()
    all_ranks = torch.cat([ranks[:, None], top_ranks], dim=-1).tolist()
    entries = []
    for r, count in enumerate(alternatives):
        row = zip(ids[r], logprobs[r], all_ranks[r], strict=True)
        entries.append(tuple(itertools.islice(row, 1 + min(count, logits.shape[1]))))
    return entries
