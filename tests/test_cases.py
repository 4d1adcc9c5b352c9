"""Reports from users of other engines, as tests of their whole kind (real model, real engine, no sockets)."""

from __future__ import annotations

import random
import re

import pytest
from checkpoints import VOCAB, checkpoint
from offline import make_core, run

from plait.config import ConfigError, EngineArgs
from plait.core.limits import Refused
from plait.core.sampling_params import SamplingParams
from plait.engine.explain import explain
from plait.engine.resolve import load_worker, resolve
from plait.engine.sharing import MemoryPlan, finish, fit, memory_decisions, sequences_that_fit

ONE = SamplingParams(temperature=0, max_tokens=1)
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


# -- C1: the second sighting --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "llama"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_identical_prompt_hits_on_the_second_sighting(family, page_size):
    core = make_core(checkpoint(family), block_size=page_size)
    prompt = tokens(2000)
    first, second, third = run(core, [prompt] * 3, ONE, at_once=1)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == third.num_cached_tokens == 1999 // page_size * page_size
    assert second.num_cached_tokens >= 0.96 * 2000
    assert first.tokens == second.tokens == third.tokens


@pytest.mark.parametrize(("page_size", "interval"), [(16, None), (16, 512), (64, 512), (32, 2048)])
def test_unmarked_siblings(page_size, interval):
    """The second recomputes at most ``snapshot_interval`` of what is shared; the third hits to the page."""
    core = make_core(checkpoint("qwen3_5"), block_size=page_size, snapshot_interval=interval)
    shared = tokens(1500)
    prompts = [shared + tokens(500, seed) for seed in range(1, 5)]
    _, second, third, fourth = run(core, prompts, ONE, at_once=1)
    interval = core.scheduler.cache.reuse.policy.interval
    assert 1500 - second.num_cached_tokens <= interval + page_size
    assert second.num_cached_tokens >= 1500 // interval * interval
    assert third.num_cached_tokens == fourth.num_cached_tokens == 1500 // page_size * page_size
    hits = core.scheduler.cache.counters.hits
    assert hits["fork"] >= 2


def test_siblings_of_an_attention_model_hit_at_once():
    core = make_core(checkpoint("llama"))
    shared = tokens(1500)
    _, second = run(core, [shared + tokens(500, seed) for seed in (1, 2)], ONE, at_once=1)
    assert second.num_cached_tokens == 1500 // 16 * 16


# -- C2: short prefixes -------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "page_size"), [("qwen3_5", 16), ("qwen3_5", 32), ("qwen3_5_moe", 16)])
def test_short_prefix(family, page_size):
    """200 prompts of 370 to 373 tokens that share 369."""
    core = make_core(checkpoint(family), block_size=page_size)
    shared = tokens(369)
    prompts = [shared + tokens(1 + i % 4, 100 + i) for i in range(200)]
    answers = run(core, prompts, ONE, at_once=1)
    rest = list(zip(prompts, answers, strict=True))[1:]
    share = sum(a.num_cached_tokens for _, a in rest) / sum(len(p) for p, _ in rest)
    assert share >= 0.85


@pytest.mark.parametrize("length", [20, 100, 528])
def test_prefixes_of_any_length(length):
    core = make_core(checkpoint("qwen3_5"))
    shared = tokens(length)
    answers = run(core, [[*shared, 5, i + 3] for i in range(4)], ONE, at_once=1)
    assert all(a.num_cached_tokens == (length + 1) // 16 * 16 for a in answers[1:])


# -- C7: too many sequences ---------------------------------------------------------------------


@pytest.mark.parametrize("states", [1, 3, 30])
def test_more_sequences_than_memory(states):
    """max_num_seqs=4096 with memory for few states: runs what fits, queues the rest, loses none."""
    folder = checkpoint("qwen3_5")
    geometry = make_core(folder).scheduler.cache.geometry
    slabs = states + -(-states * geometry.pages_for(40) // geometry.slab_pages)
    core = make_core(folder, slabs=slabs, max_num_seqs=4096, max_num_batched_tokens=256)
    prompts = [tokens(10 + i % 20, i) for i in range(3 * states + 2)]
    most = 0
    for i, prompt in enumerate(prompts):
        core.add(str(i), prompt, FEW, seed=0, max_tokens=4)
    done = {}
    while core.has_work:
        for p in core.step().progress:
            done.setdefault(p.request_id, []).extend(p.tokens)
        most = max(most, len(core.scheduler.queues.running))
        core.scheduler.check()
    assert len(done) == len(prompts)
    assert all(len(answer) == 4 for answer in done.values())
    assert states <= most <= sequences_that_fit(core.scheduler.cache.geometry, 16)


def test_start_says_how_many_fit_and_why():
    resolved = resolve(EngineArgs(model=str(checkpoint("qwen3_5")), max_num_seqs=4096, max_model_len=64))
    unit = resolved.layout.geometry(0, 1)
    plan = MemoryPlan(None, 0, 0, (30 + -(-30 // unit.slab_pages)) * unit.slab_bytes)
    geometry, longest = fit(resolved, plan)
    fits = sequences_that_fit(geometry, 16)
    assert fits == 30
    assert longest == 64
    (line,) = [str(d) for d in memory_decisions(resolved, plan, geometry) if d.name == "max_num_seqs"]
    assert f"{fits} run at once" in line
    assert "4096 asked" in line
    assert "a state and a page" in line


# -- C8: coupled sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("page_size", [16, 48, 256, 1024])
def test_any_combination_of_sizes_works(family, page_size):
    """Every budget with every page size and context length: the same greedy answer."""
    folder = checkpoint(family)
    prompt = tokens(75)
    answers = set()
    for budget in (1, 2, 15, 64, 1000, 8192):
        for length in (80, 200, 4096):
            for chunked in (True, False) if budget == 64 else (True,):
                core = make_core(
                    folder, block_size=page_size, max_num_batched_tokens=budget, max_model_len=length,
                    max_num_seqs=3, enable_chunked_prefill=chunked,
                )  # fmt: skip
                got = run(core, [prompt, prompt[:9]], FEW)
                answers.add((tuple(got[0].tokens), tuple(got[1].tokens)))
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"block_size": 20}, "32"),
        ({"block_size": 1}, "16"),
        ({"max_num_batched_tokens": 0}, "1"),
        ({"max_model_len": 100_000}, "4096"),
        ({"max_num_seqs": 0}, "1"),
        ({"snapshot_interval": 0}, "1"),
        ({"target_itl_ms": 50, "enable_chunked_prefill": False}, "chunked prefill"),
        ({"memory_limit": "1MiB"}, "set memory_limit to"),
        ({"memory_limit": "lots"}, "2GiB"),
        ({"dtype": "float8"}, "bfloat16"),
        ({"kv_cache_dtype": "nvfp4"}, "auto"),
        ({"quantization": "awq"}, "not built yet"),
        ({"preemption_mode": "stop"}, "recompute"),
        ({"swap_limit": 1000, "preemption_mode": "swap"}, "set it to that or more"),
        ({"swap_limit": "1GiB"}, "preemption_mode=swap"),
        ({"tensor_parallel_size": 2}, "set it to 1"),
        ({"device": "tpu"}, "cpu"),
        ({"scheduling_policy": "lifo"}, "priority"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(settings, nearest):
    with pytest.raises(ConfigError) as refusal:
        explain(EngineArgs(model=str(checkpoint("qwen3_5")), **settings))
    name = next(iter(settings))
    assert nearest in str(refusal.value)
    assert name in str(refusal.value) or "arena" in str(refusal.value)


def test_budget_below_a_grid_unit_is_refused(monkeypatch):
    """A backend with chunked kernels: the nearest budget that works is one grid unit."""
    from plait.kernels.registry import get_backend

    monkeypatch.setattr(type(get_backend("auto", "cpu")), "state_grid", 64)
    folder = str(checkpoint("qwen3_5"))
    with pytest.raises(ConfigError, match="nearest value that works is 64"):
        resolve(EngineArgs(model=folder, max_num_batched_tokens=63))
    core = make_core(checkpoint("qwen3_5"), max_num_batched_tokens=64)
    (first, second) = run(core, [tokens(300)] * 2, FEW, at_once=1)
    assert first.tokens == second.tokens
    assert second.num_cached_tokens == 256  # published where pages and grid meet


def test_whole_prompts_raise_the_budget():
    resolved = resolve(
        EngineArgs(
            model=str(checkpoint("qwen3_5")), max_num_batched_tokens=64, max_model_len=500, max_num_seqs=8,
            enable_chunked_prefill=False, memory_limit="8GiB",
        )
    )  # fmt: skip
    finished = finish(resolved, load_worker(resolved))
    assert finished.max_num_batched_tokens == 508
    assert any("raised from 64" in str(d) for d in finished.decisions)


# -- C14: boundaries ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("page_size", [16, 32])
def test_boundaries_of_pages_and_lengths(family, page_size):
    """A hit leaves at least one token to compute; nothing is off by one."""
    longest = 5 * page_size
    core = make_core(checkpoint(family), block_size=page_size, max_model_len=longest)
    for length in (1, page_size - 1, page_size, page_size + 1, 2 * page_size, longest - 2, longest - 1):
        prompt = tokens(length, length)
        room = longest - length
        params = SamplingParams(temperature=0, max_tokens=min(4, room), ignore_eos=True)
        first, second = run(core, [prompt] * 2, params, at_once=1)
        assert len(first.tokens) == min(4, room)
        assert first.tokens == second.tokens
        assert second.num_cached_tokens == (length - 1) // page_size * page_size < length
    with pytest.raises(Refused, match=rf"{longest} prompt tokens .* above max_model_len={longest}"):
        core.add("x", tokens(longest), ONE, seed=0, max_tokens=1)
    with pytest.raises(Refused, match="empty"):
        core.add("x", [], ONE, seed=0, max_tokens=1)


def test_the_memory_limit_that_is_advised_works():
    folder = str(checkpoint("qwen3_5"))
    with pytest.raises(ConfigError) as refusal:
        explain(EngineArgs(model=folder, memory_limit="100MiB", max_num_batched_tokens=256))
    advised = re.search(r'set memory_limit to "(\w+)" or more', str(refusal.value))
    assert advised is not None
    explain(EngineArgs(model=folder, memory_limit=advised[1], max_num_batched_tokens=256))
    with pytest.raises(ConfigError, match="is the most that works"):
        explain(EngineArgs(model=folder, memory_limit="900TiB"))
