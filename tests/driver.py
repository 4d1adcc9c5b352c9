"""The least scheduler that drives a worker: pages in order, one slot a request, chunks of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from plait.core.plan import Admission, Chunk, ChunkResult, Copy, Export, StepPlan, StepResult, TokenLogprobs
from plait.core.sampling_params import SamplingParams
from plait.worker.worker import Worker, plan_layout

PAGE_SIZE = 16


def make_worker(
    folder: Path,
    device: str = "cpu",
    slabs: int = 64,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Worker:
    """A worker with its arena, poisoned so that reading what was never written shows."""
    from plait.models.registry import config_from_folder

    layout = plan_layout(config_from_folder(folder), page_size=PAGE_SIZE, dtype=dtype)
    worker = Worker.load(folder, dtype=dtype, layout=layout, device=device, backend=backend)
    worker.allocate(slabs * layout.geometry(1 << 40, 1).slab_bytes)
    worker.arena.data.fill_(0xFF)  # NaN in every float format
    return worker


@dataclass
class Asked:
    """One request: what it asks, and what has come of it."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    start: int = 0
    pages: tuple[int, ...] = ()
    slot: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    def admission(self) -> Admission:
        return Admission(self.request_id, self.params, self.seed, self.tokens, len(self.prompt))

    def chunk(self, size: int, exports: tuple[Export, ...] = ()) -> Chunk:
        tokens = self.tokens[self.start : self.start + size]
        end = self.start + len(tokens)
        return Chunk(
            self.request_id, tokens, self.start, self.pages, self.slot, exports, end == len(self.tokens)
        )

    def take(self, chunk: Chunk, result: ChunkResult) -> None:
        assert result.request_id == self.request_id
        assert len(result.tokens) == int(chunk.sample)
        self.start = chunk.end
        self.answer += result.tokens
        self.logprobs += result.logprobs
        self.prompt_logprobs += result.prompt_logprobs


class Driver:
    """Hands out pages and slots from the start of the arena and counts steps."""

    def __init__(self, worker: Worker) -> None:
        assert worker.geometry is not None
        self.worker = worker
        self.geometry = worker.geometry
        self.steps = 0
        self._slab = 0

    def place(self, asked: Asked, tokens: int) -> None:
        """Whole slabs for the pages of ``tokens`` positions, and one for the slot."""
        g = self.geometry
        slabs = -(-g.pages_for(tokens) // g.slab_pages)
        first = self.take_slabs(slabs) * g.slab_pages
        asked.pages = tuple(range(first, first + g.pages_for(tokens)))
        if g.has_state:
            asked.slot = self.take_slabs(1) * g.slab_states

    def take_slabs(self, count: int) -> int:
        self._slab += count
        assert self._slab <= self.geometry.num_slabs
        return self._slab - count

    def step(
        self,
        chunks: Sequence[Chunk] = (),
        *,
        admitted: Sequence[Admission] = (),
        copies: Sequence[Copy] = (),
        ended: Sequence[str] = (),
    ) -> StepResult:
        self.steps += 1
        plan = StepPlan(self.steps, tuple(chunks), tuple(copies), tuple(admitted), tuple(ended))
        return self.worker.execute(plan)

    def run(self, requests: Sequence[Asked], chunk: int = 10_000, late: int = 0) -> None:
        """All requests to the end, together; request i joins ``late * i`` steps after the first."""
        waiting, running, steps = list(requests), [], 0
        for asked in waiting:
            assert asked.params.max_tokens is not None
            self.place(asked, len(asked.prompt) + asked.params.max_tokens)
        while waiting or running:
            joining = [r for i, r in enumerate(requests) if r in waiting and steps >= late * i]
            waiting = [r for r in waiting if r not in joining]
            running += joining
            chunks = [r.chunk(chunk) for r in running]
            result = self.step(chunks, admitted=[r.admission() for r in joining])
            for r, c, each in zip(running, chunks, result.results, strict=True):
                r.take(c, each)
            over = [r for r in running if len(r.answer) == r.params.max_tokens]
            if over:
                self.step(ended=[r.request_id for r in over])
            running = [r for r in running if r not in over]
            steps += 1
