"""The scheduler's rules, one by one, on plans alone."""

from __future__ import annotations

import pytest

from plait.core.arena import IntegrityError
from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.pace import Pace, StepTimeModel, pairs
from plait.core.plan import ChunkResult, StepResult
from plait.core.request import Request, Status
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Refused, Scheduler, SchedulerConfig

PAGE = 4


def make(slabs=50, *, state_bytes=256, grid=1, enabled=True, pace=None, **config):
    geometry = Geometry(PAGE, 64, state_bytes, grid, 0)
    geometry = Geometry(PAGE, 64, state_bytes, grid, slabs * geometry.slab_bytes)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 100, **config}
    return Scheduler(Cache(geometry, enabled=enabled), SchedulerConfig(**settings), pace)


def add(scheduler, name, prompt, max_tokens=5, priority=0, salt="", **params):
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    request = Request(
        name, tokens, len(tokens), SamplingParams(max_tokens=max_tokens, **params), 0, max_tokens,
        priority=priority, cache_salt=salt,
    )  # fmt: skip
    scheduler.add(request)
    return request


def step(scheduler, seconds=None):
    """Plan a step and let it sample 7s; gives {request: tokens computed} and what happened."""
    plan = scheduler.schedule()
    assert plan is not None
    results = tuple(ChunkResult(c.request_id, (7,) if c.sample else ()) for c in plan.chunks)
    progress = scheduler.update(plan, StepResult(plan.step, results), seconds)
    scheduler.check()
    return {c.request_id: len(c.tokens) for c in plan.chunks}, progress


def test_a_prompt_is_cut_into_chunks_and_sampled_at_its_end():
    scheduler = make()
    add(scheduler, "a", 40)
    assert [step(scheduler)[0] for _ in range(2)] == [{"a": 16}, {"a": 16}]
    counts, (progress,) = step(scheduler)
    assert counts == {"a": 8}
    assert progress.tokens == (7,)
    assert step(scheduler)[0] == {"a": 1}


def test_answers_go_on_beside_an_elder_prompt():
    """A long prompt that came first takes what answers leave, not all."""
    scheduler = make()
    add(scheduler, "short", 3, max_tokens=20)
    step(scheduler)
    add(scheduler, "long", 90)
    for _ in range(3):
        assert step(scheduler)[0] == {"short": 1, "long": 15}
    elder = make(priorities=True, enabled=False)
    add(elder, "short", 3, max_tokens=20)
    step(elder)
    add(elder, "long", 90, priority=-1)
    for _ in range(3):
        assert step(elder)[0] == {"long": 15, "short": 1}


def test_prompts_are_not_stalled_by_answers():
    """One grid unit of the budget is kept for prompts; answers then take turns."""
    scheduler = make(max_num_batched_tokens=4)
    for name in "abcd":
        add(scheduler, name, 1, max_tokens=50)
        step(scheduler)
    add(scheduler, "late", 6, max_tokens=50)
    seen = [step(scheduler)[0] for _ in range(6)]
    assert all(counts["late"] == 1 for counts in seen[:6])
    stepped = {name: sum(name in counts for counts in seen) for name in "abcd"}
    assert max(stepped.values()) - min(stepped.values()) <= 1


def test_chunks_end_on_the_grid():
    scheduler = make(grid=8, max_num_batched_tokens=13)
    add(scheduler, "a", 30, max_tokens=1)
    assert [step(scheduler)[0]["a"] for _ in range(4)] == [8, 8, 8, 6]
    with pytest.raises(ValueError, match="set it to 8 or more"):
        make(grid=8, max_num_batched_tokens=7)


def test_long_prefill_cap_leaves_room_for_others():
    scheduler = make(long_prefill_token_threshold=6)
    add(scheduler, "long", 50)
    add(scheduler, "short", [90, 91, 92])
    assert step(scheduler)[0] == {"long": 6, "short": 3}


def test_without_chunking_a_prompt_runs_whole():
    with pytest.raises(ValueError, match="set it to 108 or more"):
        make(chunked_prefill=False)
    scheduler = make(chunked_prefill=False, max_num_batched_tokens=108)
    add(scheduler, "a", 80)
    add(scheduler, "b", [*range(50, 90)])
    assert step(scheduler)[0] == {"a": 80}
    assert step(scheduler)[0] == {"a": 1, "b": 40}


def test_scored_prompts_compute_every_token_in_small_chunks():
    scheduler = make(max_num_batched_tokens=2000, max_model_len=2000, slabs=300)
    add(scheduler, "a", 600, max_tokens=1)
    step(scheduler)
    request = add(scheduler, "b", 600, max_tokens=1, prompt_logprobs=1)
    assert [step(scheduler)[0]["b"] for _ in range(3)] == [256, 256, 88]
    assert request.num_cached_tokens == 0


def test_first_come_first_served_or_by_priority():
    for priorities, order in ((False, ["a", "b", "c"]), (True, ["c", "a", "b"])):
        scheduler = make(priorities=priorities, max_num_seqs=1, enabled=False)
        for name, priority in (("a", 1), ("b", 1), ("c", 0)):
            add(scheduler, name, 2, max_tokens=1, priority=priority)
        assert [next(iter(step(scheduler)[0])) for _ in range(3)] == order


def test_memory_follows_the_cursor():
    scheduler = make()
    request = add(scheduler, "a", 40)
    step(scheduler)
    assert len(request.pages) == 16 // PAGE


def test_the_latest_is_preempted_and_the_elder_finishes():
    scheduler = make(slabs=6, state_bytes=64, enabled=False, max_model_len=20)
    elder = add(scheduler, "elder", 4, max_tokens=14)
    late = add(scheduler, "late", 4, max_tokens=14)
    order, admitted_beside = [], []
    while scheduler.has_work:
        before = scheduler.counters.preemptions
        plan = scheduler.schedule()
        if scheduler.counters.preemptions > before:
            admitted_beside += plan.admitted
            assert late.status is Status.WAITING
        results = tuple(ChunkResult(c.request_id, (7,) if c.sample else ()) for c in plan.chunks)
        progress = scheduler.update(plan, StepResult(plan.step, results))
        order += [p.request_id for p in progress if p.finish_reason]
        scheduler.check()
    assert order == ["elder", "late"]
    assert late.num_preemptions > 0
    assert elder.num_preemptions == 0
    assert not admitted_beside
    assert late.num_output_tokens == 14


def test_admission_waits_for_what_running_prompts_still_need():
    scheduler = make(slabs=14, state_bytes=64, max_num_batched_tokens=4, enabled=False, max_model_len=48)
    add(scheduler, "a", 36, max_tokens=2)
    add(scheduler, "b", [*range(50, 62)], max_tokens=2)
    step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]  # nine pages and a slot are spoken for
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.counters.preemptions == 0


def test_what_can_never_fit_is_refused_with_the_arithmetic():
    scheduler = make(slabs=4, state_bytes=64, max_model_len=1000)
    with pytest.raises(Refused, match=r"13 tokens need 320 bytes of cache, the arena has 256"):
        add(scheduler, "a", 10, max_tokens=3)
    with pytest.raises(Refused, match=r"990 prompt tokens and max_tokens=11 make 1001, above max_model_len"):
        add(scheduler, "a", 990, max_tokens=11)
    add(scheduler, "a", 1)
    with pytest.raises(Refused, match="in use"):
        add(scheduler, "a", 1)


def test_end_tokens_and_lengths():
    scheduler = make()
    request = add(scheduler, "a", 2, max_tokens=50, min_tokens=3)
    request.end_token_ids = frozenset([7])
    tokens = 0
    while scheduler.has_work:
        _, (progress,) = step(scheduler)
        tokens += len(progress.tokens)
    assert (tokens, progress.finish_reason, progress.stop_reason) == (3, "stop", None)
    request = add(scheduler, "b", 2, max_tokens=50, stop_token_ids=[7])
    request.end_token_ids = frozenset([7])
    _, (progress,) = step(scheduler)
    assert (progress.finish_reason, progress.stop_reason) == ("stop", 7)


def test_salts_keep_prefixes_apart():
    scheduler = make(state_bytes=0)
    cached = []
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "")):
        request = add(scheduler, name, 20, max_tokens=1, salt=salt)
        while scheduler.has_work:
            step(scheduler)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 16, 16]


def test_a_page_published_twice_adopts_the_elder():
    """Two requests compute the same prompt side by side; in the end there is one copy."""
    scheduler = make(state_bytes=0)
    a = add(scheduler, "a", 8)
    first = scheduler.schedule()
    b = add(scheduler, "b", 8)
    second = scheduler.schedule()  # a's pages are not published before its step is over
    for plan, name in ((first, "a"), (second, "b")):
        assert [c.request_id for c in plan.chunks] == [name]
        scheduler.update(plan, StepResult(plan.step, (ChunkResult(name, (7,)),)))
        scheduler.check()
    assert [p.index for p in a.pages[:2]] == [p.index for p in b.pages[:2]]
    assert scheduler.cache.usage()["pages_used"] == 2


def test_a_hash_collision_is_a_miss(monkeypatch):
    """Keys that are all alike never give one request another's pages."""
    scheduler = make(state_bytes=0)
    monkeypatch.setattr(
        type(scheduler.cache.index), "extend_keys",
        lambda self, keys, tokens, salt, pages: keys.extend([b"same"] * (pages - len(keys))),
    )  # fmt: skip
    for name, first in (("a", 0), ("b", 50), ("c", 0)):
        request = add(scheduler, name, range(first, first + 20), max_tokens=1)
        while scheduler.has_work:
            step(scheduler)
    assert request.num_cached_tokens == 4  # the first page alone: the second has another parent


def test_results_come_back_in_order():
    scheduler = make()
    add(scheduler, "a", 40)
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(IntegrityError, match="before step 1"):
        scheduler.update(second, StepResult(2, (ChunkResult("a"),)))
    assert first.step == 1


# -- pace ---------------------------------------------------------------------------------------


def seconds(tokens, token_pairs):
    return 0.004 + 2e-4 * tokens + 3e-7 * token_pairs


def test_step_time_model_learns_tokens_and_pairs():
    model = StepTimeModel()
    for i in range(60):
        tokens, token_pairs = 1 + 37 * i % 300, 1000 + 7919 * i % 90_000
        model.observe(tokens, token_pairs, seconds(tokens, token_pairs))
    for tokens, token_pairs in ((1, 100), (200, 5_000), (64, 80_000)):
        assert model.predict(tokens, token_pairs) == pytest.approx(seconds(tokens, token_pairs), rel=0.05)


def test_target_itl_shrinks_late_chunks():
    """Answers keep their pace: chunks shrink as the prompt's context grows, and steps stay near 50 ms."""
    scheduler = make(
        slabs=12_000, pace=Pace(0.05), max_num_batched_tokens=2048, max_model_len=40_000, enabled=False
    )
    add(scheduler, "answer", 1, max_tokens=5000)
    step(scheduler)
    chunks, times = [], []
    add(scheduler, "prompt", [i % 1000 for i in range(9000)], max_tokens=1)
    while "prompt" in scheduler.requests:
        plan = scheduler.schedule()
        took = seconds(plan.num_tokens, sum(pairs(c.start, len(c.tokens)) for c in plan.chunks))
        results = tuple(ChunkResult(c.request_id, (7,) if c.sample else ()) for c in plan.chunks)
        scheduler.update(plan, StepResult(plan.step, results), took)
        chunks += [len(c.tokens) for c in plan.chunks if c.request_id == "prompt"]
        times.append(took)
    settled = times[8:-1]
    assert max(settled) <= 0.05 * 1.1
    assert sum(settled) / len(settled) >= 0.05 * 0.7, "the target is used, not only kept"
    assert max(chunks[-6:-1]) < max(chunks[4:12]) / 3


def test_without_answers_a_target_does_not_slow_prompts():
    scheduler = make(pace=Pace(1e-9))
    add(scheduler, "a", 40)
    assert step(scheduler, 1.0)[0] == {"a": 16}
