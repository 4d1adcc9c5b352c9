"""A request as the scheduler sees it: tokens, a cursor, and what it holds."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from plait.core.arena import Unit
from plait.core.index import Node
from plait.core.orders import Source
from plait.core.plan import TokenLogprobs
from plait.core.sampling_params import SamplingParams
from plait.core.snapshots import SnapshotKind


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RECEIVING = "receiving"
    """its prompt comes from another engine; it holds the memory that is being filled"""
    LANDED = "landed"
    """its prompt has come; it holds its memory and waits for its turn to run"""
    LEASED = "leased"
    """its prompt was computed here; another engine may read its memory"""
    LEAVING = "leaving"
    """it has ended, but a step in flight still computes its last token"""
    FINISHED = "finished"


@dataclass(slots=True)
class PendingExport:
    """A snapshot on its way: exported by a step that is still in flight."""

    position: int
    state: Unit
    kind: SnapshotKind


@dataclass(slots=True, eq=False)
class Image:
    """What a preempted request goes on from; its units are the swap buffer's."""

    epoch: int
    """of the run that was preempted: results of its last step may still come"""
    cursor: int
    """tokens whose entries it has, once the steps in flight are over"""
    committed: int
    num_pages: int
    pages: dict[int, Unit]
    """by number; the others were shared, and are found by their keys"""
    slot: Unit | None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its growing answer.

    ``num_computed_tokens`` is the cursor: tokens whose cache entries exist once all launched steps are
    over. ``num_committed_tokens`` counts those whose step is known to be over: while the two differ, a step
    in flight computes for the request.
    """

    id: str
    tokens: list[int]
    """prompt and answer"""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int
    """most answer tokens, the model's length considered"""
    end_token_ids: frozenset[int] = frozenset()
    """ids that end the answer: the model's own (unless ``ignore_eos``) and the caller's"""
    priority: int = 0
    cache_salt: str = ""
    tail: int | None = None
    """end of the last message of a conversation, in tokens; None: the prompt's end"""
    boundaries: tuple[int, ...] = ()
    """further positions of the prompt that are likely to be shared"""
    arrival: int = 0
    leave_at: int | None = None
    """where its cursor stops and another engine goes on; None: it is answered here"""
    source: Source | None = None
    """another engine that has computed its prompt; None: nobody has, or it is not asked any more"""

    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_committed_tokens: int = 0
    num_awaited: int = 0
    """tokens that steps in flight are sampling"""
    num_reached_tokens: int = 0
    """the furthest that the cursor has been; what is computed below it was computed before"""
    pages: list[Unit] = field(default_factory=list)
    slot: Unit | None = None
    table: tuple[int, ...] = ()
    """indices of the leading pages as last read; see ``Holdings.page_table``"""
    table_moves: int = 0
    nodes: list[Node] = field(default_factory=list)
    """index nodes of the first ``len(nodes)`` pages: found there, or published"""
    page_keys: list[bytes] = field(default_factory=list)
    """hash chain over the full pages of ``tokens``, as far as it was needed"""
    marks: dict[int, SnapshotKind] = field(default_factory=dict)
    """positions at which a snapshot is wanted, besides the spaced ones"""
    epoch: int = 0
    """counts admissions, so that results of a step launched before a preemption are told apart"""
    num_cached_tokens: int | None = None
    """prompt tokens found in the cache when it was first admitted"""
    num_preemptions: int = 0
    image: Image | None = None
    """while it is preempted and was swapped out"""
    num_restores: int = 0
    """times that it waited for a prefix that a tier has"""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def length(self) -> int:
        """Tokens known and awaited."""
        return len(self.tokens) + self.num_awaited

    @property
    def goal(self) -> int:
        """Known tokens that are to be computed here."""
        return len(self.tokens) if self.leave_at is None else self.leave_at

    @property
    def num_behind(self) -> int:
        """Tokens that are left to compute now, one that is awaited included.

        0: it waits for its last token, which is sampled and never computed, or it stops where another engine
        goes on. So a request whose length is known in advance is not launched beyond it.
        """
        if self.leave_at is not None:
            return self.leave_at - self.num_computed_tokens
        return min(self.length, self.num_prompt_tokens + self.max_tokens - 1) - self.num_computed_tokens

    @property
    def in_flight(self) -> bool:
        """A step in flight computes for it."""
        return self.num_committed_tokens < self.num_computed_tokens

    @property
    def is_level(self) -> bool:
        """Only its newest answer token, which may be awaited still, is left to compute."""
        return self.num_behind == 1 and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def reads_cache(self) -> bool:
        """Log-probabilities of the prompt need every prompt token computed."""
        return self.params.prompt_logprobs is None
