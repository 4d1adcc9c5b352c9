"""How the memory of the engine process is shared out, and what fits into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.config import ConfigError
from plait.core.geometry import Geometry, round_up
from plait.core.snapshots import SnapshotPolicy
from plait.engine.memory import available_bytes, in_words, memory_bytes, parse_bytes
from plait.engine.resolve import Decision, Resolved
from plait.worker.calibrate import tokens_per_second
from plait.worker.worker import Worker, activation_bytes

DEFAULT_BUDGET = 2048
"""Largest token budget that is chosen by itself."""
SMALLEST_BUDGET = 64
STEP_SECONDS = 1.0
"""The default budget keeps a step near this."""
BESIDE_SECONDS = 0.25
"""And near this where running answers wait for the step: the longest gap between their tokens, about. Prompts
pay for it with little, since chunks of a few hundred tokens cost hardly more than long ones."""
SHARE = 0.5
"""Part of the memory at hand that the arena takes when no limit is set."""
SWAP_SHARE = 0.125
"""Part of that which the swap buffer takes when no limit is set for it."""
MARGIN = 64 * 2**20
"""Bytes left for Python and libraries to grow by."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of the engine process is shared out, in bytes."""

    limit: int | None
    held: int
    """by Python, libraries and weights, and by the server's process"""
    workspace: int
    """temporaries of the largest step"""
    arena: int
    swap: int = 0
    """for requests that are swapped out"""

    def arithmetic(self) -> str:
        whole = "" if self.limit is None else f"{in_words(self.limit)} limit: "
        rest = (
            f"+ {in_words(self.arena)} arena" if self.arena >= 0 else f"are {in_words(-self.arena)} too much"
        )
        held = f"{in_words(self.held)} program and weights + {in_words(self.workspace)} for a step"
        held += f" + {in_words(self.swap)} for swap" if self.swap else ""
        return f"{whole}{held} {rest}"


def share_memory(resolved: Resolved, held: int) -> MemoryPlan:
    """The arena takes what the limit leaves (without one, a share of what the machine has to give)."""
    args, config = resolved.args, resolved.config
    held += resolved.beside
    limit = None if args.memory_limit is None else parse_bytes(args.memory_limit)
    available = available_bytes()
    if limit is not None and available is not None and limit > available + held:
        most = (available + held) // 2**20
        raise ConfigError(
            f"memory_limit={args.memory_limit}: this machine has {in_words(available)} to give besides the "
            f'{in_words(held)} of program and weights; "{most}MiB" is the most that works'
        )
    tokens = resolved.max_num_batched_tokens or DEFAULT_BUDGET
    if not args.enable_chunked_prefill:
        tokens = max(tokens, resolved.max_model_len)
    rows = min(args.max_num_seqs, tokens)
    workspace = activation_bytes(config, tokens=tokens, logit_rows=rows, dtype=resolved.dtype) + MARGIN
    if limit is not None:
        left = limit - held - workspace
    elif available is None:
        left = 4 * 2**30
    else:
        left = min(int((available - workspace) * SHARE), _useful_arena(resolved))
    swap = _swap_bytes(resolved, left)
    return MemoryPlan(limit, held, workspace, left - swap, swap)


def _swap_bytes(resolved: Resolved, left: int) -> int:
    """Bytes of the swap buffer, of those that are left for pages and states; a whole number of slabs."""
    args = resolved.args
    if args.preemption_mode != "swap":
        return 0
    slab = resolved.layout.geometry(0, resolved.backend.state_grid).slab_bytes
    if args.swap_limit is None:
        return max(int(left * SWAP_SHARE) // slab, 2) * slab
    asked = parse_bytes(args.swap_limit)
    if asked < 2 * slab:
        raise ConfigError(
            f"swap_limit={args.swap_limit}: the least that holds a request is {2 * slab} "
            f"({in_words(2 * slab)}); set it to that or more"
        )
    return asked // slab * slab


def _useful_arena(resolved: Resolved) -> int:
    """Bytes beyond which the arena would serve nobody: every running request at full length, twice."""
    geometry = resolved.layout.geometry(0, resolved.backend.state_grid)
    return 2 * resolved.args.max_num_seqs * geometry.slabs_for(resolved.max_model_len) * geometry.slab_bytes


def fit(resolved: Resolved, plan: MemoryPlan) -> tuple[Geometry, int]:
    """The geometry, and the longest request it can hold.

    Raises:
        ConfigError: nothing fits, or not what was asked; with the arithmetic.
    """
    geometry = resolved.layout.geometry(max(plan.arena, 0), resolved.backend.state_grid)
    longest = geometry.longest_request()
    asked = resolved.args.max_model_len
    least = asked or 2
    if longest < least:
        needed = geometry.slabs_for(least) * geometry.slab_bytes
        missing = needed - plan.arena
        advice = f"free {in_words(missing)} of memory"
        if plan.limit is not None:
            enough = round_up(plan.limit + missing, 2**20) // 2**20
            advice = f'set memory_limit to "{enough}MiB" or more, or max_num_batched_tokens lower'
        if asked and longest >= 2:
            advice += f", or set max_model_len to {longest} or less"
        raise ConfigError(
            f"one request of {least} tokens needs {in_words(needed)} of arena ({plan.arithmetic()}); {advice}"
        )
    return geometry, min(longest, resolved.max_model_len)


def sequences_that_fit(geometry: Geometry, tokens: int) -> int:
    """Requests of ``tokens`` tokens each that fit into the arena together."""
    low, high = 0, geometry.num_slabs * max(geometry.slab_pages, geometry.slab_states)
    pages = geometry.pages_for(tokens)
    while low < high:
        count = (low + high + 1) // 2
        slabs = -(-count * pages // geometry.slab_pages)
        slabs += -(-count // geometry.slab_states) if geometry.has_state else 0
        if slabs <= geometry.num_slabs:
            low = count
        else:
            high = count - 1
    return low


def memory_decisions(resolved: Resolved, plan: MemoryPlan, geometry: Geometry) -> list[Decision]:
    args = resolved.args
    short, full = (sequences_that_fit(geometry, n) for n in (geometry.page_size, resolved.max_model_len))
    seqs = f"{min(short, args.max_num_seqs)} run at once at most"
    if short < args.max_num_seqs:
        each = "a state and a page" if geometry.has_state else "a page"
        why = f"{args.max_num_seqs} asked, but memory holds {each} for {short}; the others wait"
    else:
        why = f"memory holds {short} of one page, {full} of {resolved.max_model_len:,} tokens"
    shorter = resolved.max_model_len < (args.max_model_len or resolved.config.max_position_embeddings)
    decisions = [
        Decision("memory", in_words(geometry.num_slabs * geometry.slab_bytes) + " arena", plan.arithmetic()),
        Decision(
            "max_model_len",
            f"{resolved.max_model_len:,} tokens",
            "what the arena holds" if shorter else "as asked" if args.max_model_len else "the model's",
        ),
        Decision("max_num_seqs", seqs, why),
    ]
    if plan.swap:
        why = "as asked" if args.swap_limit is not None else "an eighth of what the arena would have had"
        decisions.append(Decision("swap", f"{in_words(plan.swap)} for preempted requests", why))
    decisions.append(_cache_decision(resolved, geometry))
    return decisions


def _cache_decision(resolved: Resolved, geometry: Geometry) -> Decision:
    decision = _snapshot_decision(resolved, geometry)
    budget = resolved.args.prefix_cache_budget
    if budget is None:
        return decision
    return replace(decision, value=f"on, at most {in_words(parse_bytes(budget))} beside what requests hold")


def _snapshot_decision(resolved: Resolved, geometry: Geometry) -> Decision:
    if not resolved.args.enable_prefix_caching:
        return Decision("prefix cache", "off", "as asked")
    if not geometry.has_state:
        return Decision("prefix cache", "on", f"to the page of {geometry.page_size} tokens")
    policy = SnapshotPolicy.of(geometry, resolved.args.snapshot_interval)
    return Decision(
        "prefix cache",
        "on",
        f"snapshots at the end of prompts, at forks and every {policy.interval:,} tokens, "
        f"at multiples of {policy.grid}",
    )


def finish(resolved: Resolved, worker: Worker) -> Resolved:
    """Share out memory, allocate the arena, and measure the default budget.

    Raises:
        ConfigError: not even one request fits; with the arithmetic.
    """
    plan = share_memory(resolved, memory_bytes())
    geometry, longest = fit(resolved, plan)
    resolved = replace(resolved, max_model_len=longest)
    worker.allocate(geometry.num_slabs * geometry.slab_bytes, plan.swap, shared=resolved.transfer is not None)
    budget, beside, why = _budget(resolved, worker)
    decisions = [
        *memory_decisions(resolved, plan, geometry),
        Decision("max_num_batched_tokens", f"{budget} tokens", why),
    ]
    return replace(
        resolved,
        arena_bytes=geometry.num_slabs * geometry.slab_bytes,
        max_num_batched_tokens=budget,
        prompt_tokens_beside_answers=beside,
        decisions=(*resolved.decisions, *decisions),
    )


def _budget(resolved: Resolved, worker: Worker) -> tuple[int, int, str]:
    """The token budget, what of it prompts may take beside answers (0: all), and the reason."""
    args, grid = resolved.args, resolved.backend.state_grid
    budget, beside, why = resolved.max_num_batched_tokens, 0, "as asked"
    if not budget and resolved.device == "cpu":
        speed = _measure(worker)
        budget = _tokens_in(STEP_SECONDS, speed, grid)
        why = f"measured {speed:,.0f} tokens/s: a step stays near {STEP_SECONDS:.0f} s"
        if args.target_itl_ms is None:
            beside = _tokens_in(BESIDE_SECONDS, speed, grid)
            why += f", and beside running answers near {BESIDE_SECONDS:.2f} s ({beside} tokens)"
    elif not budget:
        budget, why = max(DEFAULT_BUDGET, grid), "the default"
    if not args.enable_chunked_prefill:
        whole = resolved.max_model_len + args.max_num_seqs
        if budget < whole:
            budget, why = whole, f"raised from {budget}: without chunked prefill a prompt runs whole"
    return budget, beside, why


def _tokens_in(seconds: float, speed: float, grid: int) -> int:
    """Prompt tokens that a step of ``seconds`` computes at ``speed`` tokens a second, within bounds."""
    tokens = int(min(max(speed * seconds, SMALLEST_BUDGET), DEFAULT_BUDGET))
    return max(tokens // SMALLEST_BUDGET * SMALLEST_BUDGET, grid)


def _measure(worker: Worker) -> float:
    """Prompt tokens per second of a short prompt, after a warm-up."""
    tokens_per_second(worker, 16)
    return tokens_per_second(worker, 64)
