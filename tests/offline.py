"""An engine inside the test's own process: the real scheduler, cache, worker and kernels, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from checkpoints import oracle_logits

from plait.config import EngineArgs
from plait.core.plan import TokenLogprobs
from plait.core.sampling_params import SamplingParams
from plait.engine.core import EngineCore
from plait.engine.resolve import Resolved, load_worker, resolve
from plait.worker.worker import Worker

_workers: dict[tuple, tuple[Resolved, Worker]] = {}


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    failed: str | None = None


def make_core(folder: Path, *, slabs: int | None = None, swap_slabs: int = 0, **settings) -> EngineCore:
    """An engine on a checkpoint. ``slabs``: size of the arena; by default room for 20,000 tokens.

    Weights are read once per folder and layout.
    """
    torch.set_num_threads(1)
    args = EngineArgs(model=str(folder), cpu_threads=1, **settings)
    resolved = resolve(args)
    geometry = resolved.layout.geometry(0, resolved.backend.state_grid)
    if slabs is None:
        slabs = geometry.slabs_for(20_000) + 40
    worker = load_worker(resolved)
    size = geometry.slab_bytes
    worker.allocate(slabs * size, swap_slabs * size, shared=resolved.transfer is not None)
    assert worker.geometry is not None
    longest = min(resolved.max_model_len, worker.geometry.longest_request())
    budget = resolved.max_num_batched_tokens or 2048
    if not args.enable_chunked_prefill:
        budget = max(budget, longest + args.max_num_seqs)
    return EngineCore(replace(resolved, max_model_len=longest, max_num_batched_tokens=budget), worker)


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    at_once: int = 10**9,
    check_every: int = 16,
    seeds: Sequence[int] | None = None,
) -> list[Answer]:
    """Answers to prompts, at most ``at_once`` in the engine at a time. Recounts the books on the way."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    answers = [Answer() for _ in prompts]
    waiting = list(range(len(prompts)))
    live = steps = 0
    while waiting or core.has_work:
        while waiting and live < at_once:
            i = waiting.pop(0)
            seed = seeds[i] if seeds else each[i].seed or 0
            core.add(str(i), list(prompts[i]), each[i], seed=seed, max_tokens=each[i].max_tokens or 16)
            live += 1
        outcome = core.step()
        for p in outcome.progress:
            answer = answers[int(p.request_id)]
            answer.tokens += p.tokens
            answer.logprobs += p.logprobs
            answer.finish_reason = p.finish_reason
            answer.num_cached_tokens = p.num_cached_tokens
            live -= p.finish_reason is not None
        for request_id, why in outcome.failed.items():
            answers[int(request_id)].failed = why
            live -= 1
        steps += 1
        if steps % check_every == 0:
            core.scheduler.check()
    core.scheduler.check()
    return answers


def assert_same_greedy(folder: Path, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]) -> None:
    """Greedy answers are equal, or part where the oracle's two best logits lie within 1e-4."""
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours != theirs:
            logits = oracle_logits(folder, [*prompt, *want[:i]])[-1]
            best = torch.topk(logits, 2).values
            gap = float(best[0] - best[1])
            assert gap < 1e-4, f"token {i} is {ours}, the oracle's {theirs}, its lead {gap:.3g}"
            return
