"""The frozen description of one step: the only thing the scheduler tells the worker.

A worker executes a plan in this order:

1. ``ended``: forget these requests (they may be admitted again later).
2. ``admitted``: learn these requests (sampling parameters, tokens so far).
3. ``copies``: in order, one after the other (a later copy may overwrite an earlier source).
4. one forward pass over ``chunks``; inside it, each export is written when the recurrence of its
   chunk stands at the export's position.
5. sample one token for each chunk with ``sample``.

Plans are executed in the order in which they were made. A plan may be made, and its step prepared, while
the steps before it still run: a token that one of them samples is then *awaited*. What depends on it (the
next chunk's input, penalties, ``min_tokens``) is not in the plan; the worker, which has sampled it by the
time the step runs, fills it in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from plait.core.sampling_params import SamplingParams


class Kind(enum.IntEnum):
    """What a unit of the arena holds."""

    PAGE = 0
    STATE = 1


class Way(enum.IntEnum):
    """Between which memories a copy goes."""

    WITHIN = 0
    """the arena"""
    OUT = 1
    """from the arena to the swap buffer"""
    IN = 2
    """from the swap buffer to the arena"""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one whole page or state to another unit of the same kind."""

    kind: Kind
    source: int
    target: int
    way: Way = Way.WITHIN


@dataclass(frozen=True, slots=True)
class Export:
    """Copy the running state to unit ``state`` when exactly ``position`` tokens went into it."""

    position: int
    state: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one request that this step computes.

    ``tokens`` occupy positions ``start .. start + len(tokens) - 1``, ``awaited`` further ones the positions
    up to ``end``; ``pages`` covers every position up to there (page ``i`` holds positions
    ``i * page_size ...``). ``slot`` is the request's state unit (None for a model without recurrent layers).
    With ``start == 0`` the state is zero by definition, whatever the slot's bytes hold.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int | None
    exports: tuple[Export, ...] = ()
    sample: bool = False
    """Sample after the chunk's last token, at position ``end``."""
    awaited: int = 0
    """Tokens behind ``tokens`` that steps before this one sample."""

    @property
    def count(self) -> int:
        return len(self.tokens) + self.awaited

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that enters (or, after preemption, re-enters) the worker."""

    request_id: str
    params: SamplingParams
    seed: int
    """The request's own 64-bit seed; ``params.seed`` is not read by the worker."""
    tokens: tuple[int, ...]
    """Prompt and answer so far."""
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...] = ()
    """Every token id that ends this answer; barred while fewer than ``min_tokens`` were generated."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``step`` counts from 1 without gaps."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    admitted: tuple[Admission, ...] = ()
    ended: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


TokenLogprobs = tuple[tuple[int, float, int], ...]
"""(token id, log-probability, rank from 1) for one position: the actual token first, then the
alternatives asked for in order (log-probability descending, id ascending)."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What one chunk gave. ``len(tokens)`` is the accepted count: 0 unless the chunk sampled."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per accepted token, when the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Entries for the prompt tokens at positions ``start + 1 .. end`` of the chunk (those that exist),
    when the request asked for them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    results: tuple[ChunkResult, ...] = field(default=())
    """One per chunk of the plan, in the plan's order."""
