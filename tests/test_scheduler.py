"""The scheduler's rules, one by one, on plans alone."""

from __future__ import annotations

import pytest

from plait.core.arena import IntegrityError
from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.limits import Refused, SchedulerConfig
from plait.core.pace import Pace, StepTimeModel, pairs
from plait.core.plan import ChunkResult, StepResult
from plait.core.request import Request, Status
from plait.core.sampling_params import SamplingParams
from plait.core.scheduler import Scheduler

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
    assert [r.id for r in scheduler.queues.running] == ["a"]  # nine pages and a slot are spoken for
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
    """A hit leaves a token to compute, and so the last full page is computed again; one copy is left."""
    scheduler = make(state_bytes=0)
    a = add(scheduler, "a", 8)
    step(scheduler)
    b = add(scheduler, "b", 8)
    assert step(scheduler)[0] == {"a": 1, "b": 4}
    assert [p.index for p in a.pages[:2]] == [p.index for p in b.pages[:2]]
    assert scheduler.cache.usage()["pages_used"] == 3


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


# -- planning ahead ---------------------------------------------------------------------------------


def land(scheduler, plan, token=7):
    """The step is over and sampled ``token`` wherever it sampled."""
    results = tuple(ChunkResult(c.request_id, (token,) if c.sample else ()) for c in plan.chunks)
    progress = scheduler.update(plan, StepResult(plan.step, results))
    scheduler.check()
    return progress


def test_the_next_step_is_planned_on_awaited_tokens():
    scheduler = make()
    request = add(scheduler, "a", 20)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [len(c.tokens) for c in first.chunks + second.chunks] == [16, 4]
    (chunk,) = third.chunks
    assert (chunk.tokens, chunk.awaited, chunk.start, chunk.end, chunk.sample) == ((), 1, 20, 21, True)
    assert third.num_tokens == 1
    for plan in (first, second, third):
        land(scheduler, plan)
    assert request.tokens[20:] == [7, 7]
    assert step(scheduler)[0] == {"a": 1}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_known_length_is_not_launched_beyond(max_tokens):
    scheduler = make()
    add(scheduler, "a", 10, max_tokens=max_tokens)
    plans = [scheduler.schedule() for _ in range(4)]
    assert [plan is not None for plan in plans] == [i < max_tokens for i in range(4)]
    got = [land(scheduler, plan)[0] for plan in plans if plan]
    assert [p.finish_reason for p in got] == [None] * (max_tokens - 1) + ["length"]
    assert not scheduler.has_work


def test_what_ended_in_flight_leaves_its_leaf_where_the_last_step_left_it():
    """The step after the end token was launched already: the state stands behind that token, not before."""
    scheduler = make()
    request = add(scheduler, "a", 6, max_tokens=9)
    request.end_token_ids = frozenset([9])
    first, second, third = scheduler.schedule(), scheduler.schedule(), None
    land(scheduler, first)
    third = scheduler.schedule()
    (progress,) = land(scheduler, second, token=9)
    assert (progress.finish_reason, request.status) == ("stop", Status.LEAVING)
    assert not scheduler.has_work
    assert not scheduler.cache.index.leaves, "the step in flight still moves the state"
    assert not scheduler.cancel("a")
    assert land(scheduler, third) == []
    assert request.status is Status.FINISHED
    assert request.tokens[6:] == [7, 9]
    following = add(scheduler, "b", [*request.tokens, 30])
    step(scheduler)
    assert following.num_cached_tokens == 8
    assert scheduler.cache.usage()["states_used"] == 1


def test_a_state_two_steps_past_the_end_is_given_up():
    scheduler = make()
    request = add(scheduler, "a", 6, max_tokens=9)
    request.end_token_ids = frozenset([7])
    plans = [scheduler.schedule() for _ in range(4)]
    assert land(scheduler, plans[0])[0].finish_reason == "stop"
    assert request.status is Status.FINISHED
    assert [land(scheduler, plan) for plan in plans[1:]] == [[], [], []]
    assert not scheduler.cache.index.leaves
    assert scheduler.cache.usage()["pages_used"] == scheduler.cache.usage()["states_used"] == 0


def test_nobody_is_preempted_for_memory_that_an_ending_request_holds():
    """The elder samples its last token: what it holds is waited for."""
    scheduler = make(slabs=5, state_bytes=64, enabled=False, max_model_len=12)
    add(scheduler, "elder", 3, max_tokens=3)
    late = add(scheduler, "late", 2, max_tokens=9)
    plans = [scheduler.schedule() for _ in range(4)]
    assert [[c.request_id for c in plan.chunks] for plan in plans[:3]] == [["elder", "late"]] * 3
    assert plans[3] is None, "its next page is the elder's"
    for plan in plans[:3]:
        land(scheduler, plan)
    assert [c.request_id for c in scheduler.schedule().chunks] == ["late"]
    assert late.num_preemptions == 0


def test_a_token_in_flight_is_sampled_again_after_preemption():
    scheduler = make(slabs=5, state_bytes=64, enabled=False, max_model_len=12)
    add(scheduler, "elder", 3, max_tokens=9)
    late = add(scheduler, "late", 3, max_tokens=9)
    first, second = scheduler.schedule(), scheduler.schedule()
    third = scheduler.schedule()
    assert late.num_preemptions == 1
    assert third.ended == ("late",)
    for plan, count in ((first, 1), (second, 1), (third, 1)):
        assert len(land(scheduler, plan)) == count
    assert late.num_output_tokens == late.num_awaited == 0


def test_a_step_of_an_earlier_run_does_not_count():
    """Preempted and admitted again while the step that sampled for it is in flight."""
    scheduler = make(slabs=5, state_bytes=64, enabled=False, max_model_len=12)
    add(scheduler, "elder", 3, max_tokens=9)
    late = add(scheduler, "late", 3, max_tokens=9)
    plans = [scheduler.schedule() for _ in range(3)]
    assert late.num_preemptions == 1
    scheduler.cancel("elder")
    plans.append(scheduler.schedule())
    assert [a.request_id for a in plans[3].admitted] == ["late"]
    assert [land(scheduler, plan) for plan in plans[:3]] == [[], [], []]
    assert late.num_output_tokens == 0
    assert [p.tokens for p in land(scheduler, plans[3])] == [(7,)]


def test_what_found_no_token_is_dropped_from_steps_in_flight():
    scheduler = make()
    for name in "ab":
        add(scheduler, name, 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.fail(first, ["b", "z"]) == ["b"]
    assert [p.request_id for p in land(scheduler, first)] == ["a"]
    assert scheduler.fail(second, ["b"]) == []
    assert [p.request_id for p in land(scheduler, second)] == ["a"]
    assert scheduler.schedule().step == 3
    with pytest.raises(IntegrityError, match="step 1 failed before step 3"):
        scheduler.fail(first, ["a"])


@pytest.mark.parametrize("state_bytes", [0, 64])
def test_a_prefix_in_flight_is_waited_for(state_bytes):
    """Who comes while the step that computes its prefix runs takes that over, and computes the rest."""
    scheduler = make(state_bytes=state_bytes, max_num_batched_tokens=40)
    add(scheduler, "a", 30)
    first = scheduler.schedule()
    late = add(scheduler, "b", [*range(30), 90, 91])
    second = scheduler.schedule()
    assert [c.request_id for c in second.chunks] == ["a"]
    land(scheduler, first)
    third = scheduler.schedule()
    assert {c.request_id: c.count for c in third.chunks} == {"a": 1, "b": 4}
    assert late.num_cached_tokens == 28


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


def test_prompts_leave_room_beside_answers():
    """Two prompts share what a step may compute beside an answer; alone they have the whole budget."""
    scheduler = make(slabs=1000, max_num_batched_tokens=64, prompt_tokens_beside_answers=10, enabled=False)
    add(scheduler, "answer", 1, max_tokens=4)
    step(scheduler)
    add(scheduler, "a", 14, max_tokens=1)
    add(scheduler, "b", [9] * 90, max_tokens=1)
    assert step(scheduler)[0] == {"answer": 1, "a": 10}
    assert step(scheduler)[0] == {"answer": 1, "a": 4, "b": 6}
    assert step(scheduler)[0] == {"answer": 1, "b": 10}
    assert step(scheduler)[0] == {"b": 64}


def test_without_answers_a_target_does_not_slow_prompts():
    scheduler = make(pace=Pace(1e-9))
    add(scheduler, "a", 40)
    assert step(scheduler, 1.0)[0] == {"a": 16}
