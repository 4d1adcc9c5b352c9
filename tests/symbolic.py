"""Symbolic memory: a worker without a model that finds corruption, not only leaks.

Each token position of a request has a *digest*, a number that depends on every token up to it: what a
real model's KV entry or recurrent state is a function of. The fake worker writes digests into pages and
states where a model would write numbers, and asserts before every read that it finds what the request
should see. The sampled token is a function of the last digest, so answers can be compared with those of
a run that was never disturbed.
"""

from __future__ import annotations

from plait.core.arena import Unit
from plait.core.geometry import Geometry
from plait.core.plan import Chunk, ChunkResult, Kind, StepPlan, StepResult, Way

VOCABULARY = 50


class Corruption(AssertionError):
    """A read found something else than the request should see."""


def digests(tokens, known=()) -> list[int]:
    """One digest per prefix: ``digests(t)[i]`` stands for tokens 0..i."""
    out = list(known)
    last = out[-1] if out else 0
    for token in tokens[len(out) :]:
        last = hash((last, token))
        out.append(last)
    return out


def next_token(last: int) -> int:
    return last % VOCABULARY


def answer(prompt: list[int], max_tokens: int, ends: frozenset[int]) -> list[int]:
    """What an undisturbed run says."""
    tokens = list(prompt)
    trail: list[int] = []
    while len(tokens) - len(prompt) < max_tokens:
        trail = digests(tokens, trail)
        tokens.append(next_token(trail[-1]))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class SymbolicWorker:
    """Executes plans on memory that holds digests. ``truth`` maps request ids to their tokens."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.bytes: dict[int, object] = {}
        """arena page -> list of digests, or the owner's mark; a state covers its slab's pages"""
        self.states: dict[int, int | None] = {}
        self.trails: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.swap: SymbolicWorker | None = None
        """whose memory is the swap buffer"""

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.ended:
            if self.tokens.pop(request_id, None) is None:
                raise Corruption(f"{request_id} ends but never began")
            del self.trails[request_id]
        for admission in plan.admitted:
            self.tokens[admission.request_id] = list(admission.tokens)
            self.trails[admission.request_id] = digests(admission.tokens)
        for copy in plan.copies:
            source = self.swap if copy.way is Way.IN else self
            target = self.swap if copy.way is Way.OUT else self
            if copy.kind is Kind.PAGE:
                target.write_page(copy.target, list(source.read_page(copy.source)))
            else:
                target.write_state(copy.target, source.states.get(copy.source))
        return StepResult(plan.step, tuple(self.compute(chunk) for chunk in plan.chunks))

    # -- memory: pages and states lie over the same bytes -----------------------------------

    def read_page(self, page: int) -> list[int | None]:
        content = self.bytes.get(page)
        return content if isinstance(content, list) else [None] * self.geometry.page_size

    def write_page(self, page: int, content: list[int | None]) -> None:
        self.states.pop(self.state_over(page), None)
        if self.geometry.slab_states > 1:
            self.clobber_states(page)
        self.bytes[page] = content

    def state_over(self, page: int) -> int:
        return page // self.geometry.slab_pages * self.geometry.slab_states

    def clobber_states(self, page: int) -> None:
        first = self.state_over(page)
        for state in range(first, first + self.geometry.slab_states):
            self.states.pop(state, None)

    def write_state(self, state: int, content: int | None) -> None:
        slab = state // self.geometry.slab_states
        for page in range(slab * self.geometry.slab_pages, (slab + 1) * self.geometry.slab_pages):
            self.bytes.pop(page, None)
        self.states[state] = content

    def write_unit(self, unit: Unit, mark: int) -> None:
        """An outside actor writes all of a unit."""
        if unit.kind is Kind.PAGE:
            self.write_page(unit.index, [mark] * self.geometry.page_size)
        else:
            self.write_state(unit.index, mark)

    def holds(self, unit: Unit, mark: int) -> bool:
        if unit.kind is Kind.PAGE:
            return self.read_page(unit.index) == [mark] * self.geometry.page_size
        return self.states.get(unit.index) == mark

    # -- one chunk --------------------------------------------------------------------------

    def compute(self, chunk: Chunk) -> ChunkResult:
        size = self.geometry.page_size
        tokens = self.tokens[chunk.request_id]
        trail = self.trails[chunk.request_id]
        if tuple(tokens[chunk.start : chunk.end - chunk.awaited]) != chunk.tokens:
            raise Corruption(f"{chunk.request_id}: the plan has other tokens than the request")
        if chunk.end > len(tokens):
            raise Corruption(f"{chunk.request_id}: an awaited token was never sampled")
        if chunk.end % self.geometry.state_grid and chunk.end != len(tokens):
            raise Corruption(f"{chunk.request_id}: a chunk ends at {chunk.end}, off the grid")
        if chunk.sample != (chunk.end == len(tokens)):
            raise Corruption(f"{chunk.request_id}: samples at {chunk.end} of {len(tokens)}")
        for i in range(-(-chunk.start // size)):
            want = trail[i * size : min((i + 1) * size, chunk.start)]
            if self.read_page(chunk.pages[i])[: len(want)] != want:
                raise Corruption(f"{chunk.request_id}: page {i} (unit {chunk.pages[i]}) holds something else")
        self.read_and_write_state(chunk, trail)
        for position in range(chunk.start, chunk.end):
            page = chunk.pages[position // size]
            content = self.read_page(page)
            content[position % size] = trail[position]
            self.write_page(page, content)
        if not chunk.sample:
            return ChunkResult(chunk.request_id)
        token = next_token(trail[-1])
        tokens.append(token)
        trail[:] = digests(tokens, trail)
        return ChunkResult(chunk.request_id, (token,))

    def read_and_write_state(self, chunk: Chunk, trail: list[int]) -> None:
        if chunk.slot is None:
            return
        if chunk.start and self.states.get(chunk.slot) != trail[chunk.start - 1]:
            raise Corruption(f"{chunk.request_id}: the state is not the one at {chunk.start}")
        self.write_state(chunk.slot, trail[chunk.end - 1])
        for export in chunk.exports:
            if not chunk.start < export.position <= chunk.end:
                raise Corruption(f"{chunk.request_id}: export at {export.position} outside the chunk")
            self.write_state(export.state, trail[export.position - 1])
