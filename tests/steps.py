"""Drives a model without engine: a tiny allocator of pages and states, and batches made by hand.

Memory is handed out at random and filled with NaN bytes first, so that whatever reads what it did not write
shows it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.kernels.batch import Batch
from plait.kernels.layout import CacheLayout, CacheViews


def make_batch(
    chunks: Sequence[tuple[Sequence[int], int, Sequence[int], int]],
    exports: Sequence[tuple[int, int, int]] = (),
    logit_rows: Sequence[int] | None = None,
) -> Batch:
    """A batch of chunks (tokens, context length, pages, slot); by default all rows give logits."""
    starts, positions, ids = [0], [], []
    for tokens, context, _, _ in chunks:
        ids += tokens
        positions += range(context, context + len(tokens))
        starts.append(len(ids))
    width = max(len(pages) for _, _, pages, _ in chunks)
    table = [[*pages, *[0] * (width - len(pages))] for _, _, pages, _ in chunks]
    contexts = tuple(context for _, context, _, _ in chunks)
    slots = tuple(slot for _, _, _, slot in chunks)
    rows = list(range(len(ids))) if logit_rows is None else list(logit_rows)
    return Batch(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        page_table=torch.tensor(table, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        query_start_host=tuple(starts),
        context_lens_host=contexts,
        slots_host=slots,
        exports=tuple(exports),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
    )


def nan_arena(size: int) -> torch.Tensor:
    """An arena whose every float, of any width, is NaN."""
    return torch.full((size,), 0xFF, dtype=torch.uint8)


@dataclass
class Stream:
    """One request: its tokens, how many are computed, its pages and slot, and the logits it got so far."""

    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed


class Harness:
    """A model with an arena. Pages come from the upper half of it, states from the lower."""

    def __init__(
        self, model: Any, layout: CacheLayout, *, arena_bytes: int = 48 << 20, seed: int = 0
    ) -> None:
        self.model = model
        self.layout = layout
        self.geometry = layout.geometry(arena_bytes, 1)
        self.views = CacheViews(nan_arena(arena_bytes), layout, self.geometry)
        half = self.geometry.num_slabs // 2 if layout.state else 0
        self._pages = list(range(half * self.geometry.slab_pages, self.geometry.num_pages))
        self._states = list(range(half * self.geometry.slab_states))
        self.random = random.Random(seed)
        self.random.shuffle(self._pages)
        self.random.shuffle(self._states)

    def stream(self, tokens: Sequence[int]) -> Stream:
        return Stream(list(tokens), slot=self.new_state())

    def new_state(self) -> int:
        return self._states.pop() if self.layout.state else 0

    def resume(self, source: Stream, state: int, computed: int) -> Stream:
        """A request that goes on from a state exported after ``computed`` tokens, on copied pages."""
        count = self.geometry.pages_for(computed)
        stream = Stream(source.tokens, computed, [self._pages.pop() for _ in range(count)], self.new_state())
        for old, new in zip(source.pages, stream.pages, strict=False):
            self.views.pages[new] = self.views.pages[old]
        self.views.states[stream.slot] = self.views.states[state]
        return stream

    def step(self, work: Sequence[tuple[Stream, int]], exports: Sequence[tuple[int, int, int]] = ()) -> None:
        """Compute the next ``count`` tokens of each stream in one pass."""
        chunks = []
        for stream, count in work:
            end = stream.computed + count
            while len(stream.pages) < self.geometry.pages_for(end):
                stream.pages.append(self._pages.pop())
            chunks.append((stream.tokens[stream.computed : end], stream.computed, stream.pages, stream.slot))
        logits = self.model.forward(make_batch(chunks, exports), self.views)
        for (stream, count), part in zip(work, logits.split([count for _, count in work]), strict=True):
            stream.computed += count
            stream.logits.append(part)

    def run(self, streams: Sequence[Stream], budget: int) -> None:
        """All of them to their ends, in steps of at most ``budget`` tokens, chunks of random sizes."""
        while waiting := [stream for stream in streams if stream.left]:
            self.random.shuffle(waiting)
            work, room = [], budget
            for stream in waiting:
                count = min(stream.left, room, self.random.choice((1, 1, 3, 17, 64, 100)))
                if count:
                    work.append((stream, count))
                    room -= count
            self.step(work)
