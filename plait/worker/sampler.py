"""The next token of each request, from a row of logits.

Each row goes through: logit bias, penalties, what its structure allows, bar on end tokens, temperature,
top-k, top-p, min-p, then the Gumbel-max draw (but a token that a request's own rule forces comes whatever
the logits are)

    argmax over kept v of  logit[v] / temperature + G(seed, position, v),   G = -log(-log(u)),

which follows the softmax of the kept logits (Gumbel 1954; Maddison, Tarlow, Minka 2014). u comes
from Philox keyed by (seed, position, token id), so a draw does not depend on the batch, on the order in
which tokens are looked at, or on other rows. Decisions rest on arithmetic with fixed bits
(``plait/worker/exact.py``); where a faster approximation narrows the choice, what it cannot tell apart is
decided exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from plait.core.plan import TokenLogprobs
from plait.core.sampling_params import SamplingParams
from plait.kernels.cpu import sampling as native
from plait.worker.exact import exp_, log, running_sum, sum_exp
from plait.worker.logprobs import token_logprobs
from plait.worker.philox import uniforms
from plait.worker.request import RequestState
from plait.worker.top import first_largest, ordered_top

_NOISE_SPREAD = 40.5
"""Above the span of G over odd multiples of 2**-53: 53 ln 2 + ln(53 ln 2) = 40.35. A token further than this
below the best cannot win."""
_APPROXIMATION = 1e-9
"""Far above the error of scores below 100 computed with the library's log (about 1e-13)."""
_FIRST_NUCLEUS = 256
"""Tokens in which a top-p set is sought first."""
_NUCLEUS_GROWTH = 16
_DRAWS = 16384
"""Draws made at once on a CPU: their scratch stays in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """Who a row of logits belongs to; ``position`` is where its sampled token goes."""

    request: RequestState
    position: int


@dataclass(slots=True)
class Samples:
    """One entry per row. Where ``bad`` or ``barred`` names a row, its token is None and means nothing."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    """for requests that asked for them"""
    bad: list[int] = field(default_factory=list)
    """rows whose logits, as given, hold NaN or +inf, or nothing above -inf"""
    barred: list[int] = field(default_factory=list)
    """rows of which the request's own adjustments (a structure, a bar on end tokens) leave no token"""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> Samples:
    """Sample one token per row. ``logits`` float32 [R, V] is not changed; R = len(rows)."""
    if logits.shape[0] != len(rows) or logits.dtype != torch.float32:
        asked, shape = f"float32 with {len(rows)} rows", list(logits.shape)
        raise ValueError(f"logits are {logits.dtype} {shape}: {asked} is needed")
    if not rows:
        return Samples([], [])
    peaks, ids = first_largest(logits)
    tokens: list[int | None] = ids.tolist()
    bad = {r for r, peak in enumerate(peaks.tolist()) if not math.isfinite(peak)}
    barred: set[int] = set()
    special = [
        r
        for r, row in enumerate(rows)
        if r not in bad and (row.request.adjusts_logits or not row.request.params.greedy)
    ]
    if special:
        chosen = _sample_special(logits[special], [rows[r] for r in special])
        for r, token in zip(special, chosen, strict=True):
            tokens[r] = token
            if token is None:
                barred.add(r)
    for r, row in enumerate(rows):
        if (forced := row.request.forced_token) is not None and r not in bad:
            tokens[r] = forced
            barred.discard(r)
    for r in bad | barred:
        tokens[r] = None
    return Samples(tokens, _logprobs(logits, rows, tokens), sorted(bad), sorted(barred))


def _sample_special(logits: torch.Tensor, rows: list[Row]) -> list[int | None]:
    """Tokens of adjusted or drawn rows; None where no finite logit is left. ``logits`` is overwritten."""
    adjust_(logits, [row.request for row in rows])
    peaks, ids = first_largest(logits)
    tokens: list[int | None] = ids.tolist()
    narrow: list[int] = []
    wide: list[int] = []
    for r, finite in enumerate(peaks.isfinite().tolist()):
        params = rows[r].request.params
        if not finite:
            tokens[r] = None
        elif not params.greedy:
            (narrow if _top_k(params, logits.shape[1]) or params.top_p < 1 else wide).append(r)
    chosen: dict[int, int] = {}
    nucleus = _FIRST_NUCLEUS
    while narrow:
        drawn = _draw_narrow(logits[narrow], peaks[narrow], [rows[r] for r in narrow], nucleus)
        chosen |= {r: token for r, token in zip(narrow, drawn, strict=True) if token is not None}
        narrow = [r for r in narrow if r not in chosen]
        nucleus *= _NUCLEUS_GROWTH
    for r in wide:
        chosen[r] = _draw_wide(logits[r], peaks[r], rows[r])
    for r, token in chosen.items():
        tokens[r] = token
    return tokens


def adjust_(logits: torch.Tensor, requests: Sequence[RequestState]) -> None:
    """Logit bias, penalties, what structures allow and the bar on end tokens, in place on float32 [R, V].

    Repetition divides a positive logit and multiplies a negative one, for every token seen (Keskar et al.
    2019, as in vLLM); frequency subtracts per occurrence in the answer, presence once.
    """
    flat, vocab, device = logits.view(-1), logits.shape[1], logits.device
    largest = torch.finfo(torch.float32).max

    def gather(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    biased = [(r * vocab, q) for r, q in enumerate(requests) if len(q.bias)]
    if biased:
        where = gather([start + q.bias_ids for start, q in biased])
        flat[where] = (flat[where] + gather([q.bias for _, q in biased])).clamp_(max=largest)

    penalised = [(r * vocab, q.counts, q.params) for r, q in enumerate(requests) if q.counts is not None]
    if penalised:
        where = gather([start + counts.ids for start, counts, _ in penalised])
        count = gather([counts.counts for _, counts, _ in penalised])
        factors = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, p in penalised],
            dtype=np.float32,
        )
        sizes = [len(counts.ids) for _, counts, _ in penalised]
        repetition, frequency, presence = torch.from_numpy(np.repeat(factors, sizes, axis=0).T).to(device)
        x = flat[where]
        x = torch.where(x > 0, x / repetition, x * repetition).clamp_(max=largest)
        flat[where] = x - frequency * count - presence * (count > 0)

    for row, request in zip(logits, requests, strict=True):
        if request.structure is not None and request.forced_token is None:
            row.masked_fill_(torch.from_numpy(~request.structure.allowed).to(device), -math.inf)

    barred = [r * vocab + q.barred_ids for r, q in enumerate(requests) if q.bars_end]
    if barred:
        flat[gather(barred)] = -math.inf


def _draw_narrow(
    logits: torch.Tensor, peaks: torch.Tensor, rows: list[Row], nucleus: int
) -> list[int | None]:
    """Draws for rows with top-k or top-p, from the first tokens of each in order.

    ``nucleus``: tokens looked at where top-p stands alone. None for a row whose top-p set is larger.
    """
    device, vocab = logits.device, logits.shape[1]
    params = [row.request.params for row in rows]
    top_k = [_top_k(p, vocab) for p in params]
    wanted = [k or min(nucleus, vocab) for k in top_k]
    top_p = _column([p.top_p if p.top_p < 1 else math.inf for p in params], device)
    temperatures = _column([p.temperature for p in params], device)
    floors = _column([math.log(p.min_p) if p.min_p else -math.inf for p in params], device)
    peaks = peaks.to(torch.float64)[:, None]

    values, ids = ordered_top(logits, wanted)
    scaled = (values.to(torch.float64) - peaks) / temperatures  # at most 0: no temperature overflows
    last = torch.tensor(wanted, device=device)[:, None] - 1
    kept = (torch.arange(max(wanted), device=device) <= last) & (scaled > -math.inf)
    up_to = running_sum(torch.where(kept, exp_(scaled.clone()), 0.0))
    seen = up_to.gather(1, last)
    total = seen.clone()
    partly = [r for r, k in enumerate(top_k) if not k and wanted[r] < vocab]
    if partly:
        total[partly, 0] = sum_exp(logits[partly], peaks[partly, 0], temperatures[partly, 0])
    mass = top_p * total
    enough = (seen >= mass)[:, 0].tolist()
    before = torch.nn.functional.pad(up_to[:, :-1], (1, 0))
    kept &= (before < mass) & (scaled >= floors)  # the token that crosses top_p has less before it: kept

    seeds, positions = [row.request.seed for row in rows], [row.position for row in rows]
    drawn = _best(scaled, kept, ids, uniforms(seeds, positions, ids)).tolist()
    return [None if r in partly and not enough[r] else token for r, token in enumerate(drawn)]


def _draw_wide(logits: torch.Tensor, peak: torch.Tensor, row: Row) -> int:
    """The draw of one row, float32 [V], from the whole vocabulary but for min-p."""
    params = row.request.params
    floor = max(-_NOISE_SPREAD, math.log(params.min_p) if params.min_p else -math.inf)
    if native.usable(logits):
        return native.draw(
            logits, peak=float(peak), temperature=params.temperature, floor=floor,
            seed=row.request.seed, position=row.position,
        )  # fmt: skip
    temperature = _column([params.temperature], logits.device)[0]  # a tensor: CUDA multiplies by 1 / scalar
    scaled = (logits.to(torch.float64) - peak.to(torch.float64)) / temperature
    ids = (scaled >= floor).nonzero()[:, 0]
    scaled = scaled[ids]
    draws = torch.empty_like(scaled)
    step = _DRAWS if logits.device.type == "cpu" else len(ids)
    for start in range(0, len(ids), step):
        part = slice(start, start + step)
        draws[part] = uniforms([row.request.seed], [row.position], ids[None, part])[0]
    score = scaled - draws.log().neg_().log_()
    near = score >= score.max() - _APPROXIMATION
    scaled, ids, draws = scaled[near][None], ids[near][None], draws[near][None]
    return int(_best(scaled, torch.ones_like(ids, dtype=torch.bool), ids, draws))


def _best(scaled: torch.Tensor, kept: torch.Tensor, ids: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the kept id, of [R, C], with the largest scaled logit plus noise; the lowest on a tie."""
    score = torch.where(kept, scaled - log(-log(draws)), -math.inf)
    best = score.amax(-1, keepdim=True)
    return torch.where(kept & (score == best), ids, torch.iinfo(torch.int64).max).amin(-1)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[Row], tokens: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """From the raw logits, for rows that ask for them and have a token."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [
        (r, token, row.request.params.logprobs)
        for r, (row, token) in enumerate(zip(rows, tokens, strict=True))
        if token is not None and row.request.params.logprobs is not None
    ]
    if asked:
        at, chosen, counts = (list(column) for column in zip(*asked, strict=True))
        for r, entry in zip(at, token_logprobs(logits[at], chosen, counts), strict=True):
            found[r] = entry
    return found


def _top_k(params: SamplingParams, vocab: int) -> int:
    """0 where every token is kept."""
    return params.top_k if params.top_k < vocab else 0


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    """float64 [R, 1]"""
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
