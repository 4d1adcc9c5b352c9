"""From the chunks of a plan to the flat batch that models see."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from plait.core.geometry import Geometry
from plait.core.plan import Chunk
from plait.kernels.batch import Batch
from plait.worker.request import RequestState


class PlanError(ValueError):
    """A plan contradicts itself or what the worker knows. Nothing was computed; the engine has a bug."""


def check_chunks(chunks: Sequence[Chunk], requests: Mapping[str, RequestState], g: Geometry) -> None:
    """Refuse chunks that would read or write what is not theirs.

    Raises:
        PlanError: names the request, what the plan says and what holds.
    """
    seen: set[str] = set()
    for chunk in chunks:
        name = f"the chunk of request {chunk.request_id!r}"
        state = requests.get(chunk.request_id)
        if state is None:
            raise PlanError(f"{name} comes before its admission")
        if chunk.request_id in seen:
            raise PlanError(f"{name} comes twice in one step")
        seen.add(chunk.request_id)
        if chunk.count < 1 or chunk.awaited < 0 or chunk.start < 0:
            raise PlanError(f"{name} has {chunk.count} tokens from {chunk.start}; both must be sound")
        if list(chunk.tokens) != state.tokens[chunk.start : chunk.end - chunk.awaited]:
            raise PlanError(
                f"{name} brings tokens for positions {chunk.start} to {chunk.end - chunk.awaited - 1} that "
                f"differ from the {len(state.tokens)} tokens the worker holds"
            )
        if chunk.end > state.length:
            raise PlanError(f"{name} awaits a token at {chunk.end - 1}; {state.length} are to be had by then")
        if chunk.sample and chunk.end != state.length:
            raise PlanError(f"{name} samples at position {chunk.end}, but {state.length} is next")
        if len(chunk.pages) < g.pages_for(chunk.end):
            raise PlanError(
                f"{name} has {len(chunk.pages)} pages; {chunk.end} positions need {g.pages_for(chunk.end)}"
            )
        _check_states(name, chunk, g)


def _check_states(name: str, chunk: Chunk, g: Geometry) -> None:
    if (chunk.slot is None) == g.has_state:
        raise PlanError(f"{name} has slot {chunk.slot}; the model has {'a' if g.has_state else 'no'} state")
    if chunk.exports and not g.has_state:
        raise PlanError(f"{name} exports a state, but the model has none")
    units = [export.state for export in chunk.exports] + ([] if chunk.slot is None else [chunk.slot])
    if len(set(units)) != len(units) or any(not 0 <= unit < g.num_states for unit in units):
        raise PlanError(f"{name} uses states {units}; they must differ and lie below {g.num_states}")
    if any(not chunk.start < export.position <= chunk.end for export in chunk.exports):
        places = [export.position for export in chunk.exports]
        raise PlanError(f"{name} covers {chunk.start} to {chunk.end} tokens and cannot export at {places}")


def build_batch(
    chunks: Sequence[Chunk],
    wanted: Sequence[Sequence[int]],
    *,
    num_pages: int,
    vocab_size: int,
    device: torch.device,
) -> Batch:
    """The flat batch of one step, with 0 for tokens that are awaited.

    Integers are put together in two buffers, so that a device gets them in two transfers.

    Args:
        chunks: checked chunks, at least one.
        wanted: positions of each chunk whose logits are needed, ascending.
        num_pages: pages of the arena.
        vocab_size: token ids run from 0 to here.
        device: of the tensors.

    Raises:
        PlanError: a page or a token id does not exist.
    """
    starts = [0, *itertools.accumulate(chunk.count for chunk in chunks)]
    context = [chunk.start for chunk in chunks]
    slots = [chunk.slot or 0 for chunk in chunks]
    total, count = starts[-1], len(chunks)
    rows = [
        first + position - chunk.start
        for chunk, first, positions in zip(chunks, starts, wanted, strict=False)
        for position in positions
    ]
    # Lists, until they are whole: a step has few numbers, and a call of numpy costs as much as a hundred.
    places = itertools.chain.from_iterable(range(chunk.start, chunk.end) for chunk in chunks)
    long = np.array([*_token_ids(chunks, vocab_size), *places, *rows], dtype=np.int64)
    table = _page_table(chunks, num_pages)
    short = np.array(starts + context + slots + table, dtype=np.int32)

    token_ids, positions, logit_rows = _parts(long, [total, total, len(rows)], device)
    bounds, contexts, units, pages = _parts(short, [count + 1, count, count, len(table)], device)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        query_start=bounds,
        context_lens=contexts,
        page_table=pages.view(count, -1),
        slots=units,
        query_start_host=tuple(starts),
        context_lens_host=tuple(context),
        slots_host=tuple(slots),
        exports=tuple(
            (b, export.position - chunk.start, export.state)
            for b, chunk in enumerate(chunks)
            for export in sorted(chunk.exports, key=lambda export: export.position)
        ),
        logit_rows=logit_rows,
    )


def _token_ids(chunks: Sequence[Chunk], vocab_size: int) -> list[int]:
    """T ids, 0 for those that are awaited."""
    ids = [token for c in chunks for token in (*c.tokens, *(0,) * c.awaited)]
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(c.request_id for c in chunks if any(not 0 <= token < vocab_size for token in c.tokens))
        raise PlanError(f"request {wrong!r} has token ids outside 0 .. {vocab_size - 1}, the vocabulary")
    return ids


def _page_table(chunks: Sequence[Chunk], num_pages: int) -> list[int]:
    """B rows of P pages, filled with 0 behind each chunk's."""
    width = max(len(chunk.pages) for chunk in chunks)
    table: list[int] = []
    for chunk in chunks:
        table += chunk.pages
        table += [0] * (width - len(chunk.pages))
    if min(table) < 0 or max(table) >= num_pages:
        raise PlanError(f"pages run from {min(table)} to {max(table)}; the arena holds {num_pages}")
    return table


def _parts(buffer: np.ndarray, sizes: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The buffer on the device, by one transfer, cut into runs of these sizes."""
    return torch.split(torch.from_numpy(buffer).to(device), sizes)
