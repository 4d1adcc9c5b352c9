"""Positions in conversations, for templates of several kinds; and what the cache makes of them."""

from __future__ import annotations

import pytest
from test_scheduler import PAGE, add, make, step

from plait.core.snapshots import SnapshotKind, SnapshotPolicy
from plait.text.boundaries import Boundaries, boundaries_of, message_starts

BOS, START, END, EOT = 1, 2, 3, 4
SPECIAL = {BOS, START, END, EOT}


def chatml(lengths, generation=True, bos=False):
    """<start> text <end>, as in Qwen and SmolLM2."""
    tokens, starts = [BOS] if bos else [], []
    for length in lengths:
        starts.append(len(tokens))
        tokens += [START, *[9] * length, END, 10]
    if generation:
        starts.append(len(tokens))
        tokens += [START, 11, 10]
    return tokens, starts


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("lengths", [[5], [3, 8], [3, 8, 1, 20]])
def test_starts_of_chatml(lengths, generation, bos):
    tokens, starts = chatml(lengths, generation, bos)
    found = message_starts(tokens, SPECIAL, len(lengths), generation)
    assert found == (starts if len(starts) > 1 else [])


def test_a_system_message_that_the_template_adds():
    tokens, starts = chatml([7, 3, 8])  # two messages were given, three rendered
    assert message_starts(tokens, SPECIAL, 2, True) == starts
    marks = boundaries_of(starts, 2, True, has_system=False)
    assert marks == Boundaries(starts[-1], (starts[1], starts[2]))


def test_starts_with_headers():
    """Llama 3: <start>role<end-of-header> text <eot>; one token opens, another ends each message."""
    tokens, starts = [BOS], []
    for length in (4, 6, 2):
        starts.append(len(tokens))
        tokens += [START, 8, END, *[9] * length, EOT]
    starts.append(len(tokens))
    tokens += [START, 8, END]
    assert message_starts(tokens, SPECIAL, 3, True) == starts


def test_nothing_is_claimed_where_nothing_can_be_told():
    assert message_starts([9] * 50, SPECIAL, 2, True) == []
    assert message_starts([BOS, *[9] * 50], SPECIAL, 3, True) == []
    assert boundaries_of([], 3, True, has_system=True) == Boundaries()


def test_what_is_marked():
    _, starts = chatml([30, 8, 5, 9, 7])  # system, user, assistant, user, ... and the generation prompt
    marks = boundaries_of(starts, 5, True, has_system=True)
    assert marks == Boundaries(starts[5], (starts[1], starts[4]))
    marks = boundaries_of(starts, 5, True, has_system=False, marked_messages=[2])
    assert marks == Boundaries(starts[5], (starts[3], starts[4]))


def test_marks_are_kept_by_worth():
    policy = SnapshotPolicy(interval=1000, grid=16)
    marks = policy.marks(500, found=0, known=100, tail=470, boundaries=(40, 200, 300, 400))
    assert marks == {464: SnapshotKind.TAIL, 400: SnapshotKind.BOUNDARY, 288: SnapshotKind.BOUNDARY,
                     192: SnapshotKind.BOUNDARY}  # fmt: skip
    assert policy.marks(500, found=0, known=100) == {496: SnapshotKind.TAIL, 96: SnapshotKind.FORK}
    assert policy.marks(16, found=0, known=0) == {}


def finish(scheduler):
    while scheduler.has_work:
        step(scheduler)


def test_siblings_of_a_system_prompt_hit_on_the_second_message():
    scheduler = make(slabs=400, max_model_len=600, max_num_batched_tokens=64)
    system = list(range(100, 341))
    cached = []
    for i in range(20):
        request = add(scheduler, f"r{i}", [*system, *[500 + i] * 20, 7], max_tokens=1)
        request.boundaries = (len(system),)
        finish(scheduler)
        cached.append(request.num_cached_tokens)
    assert cached == [0] + [241 // PAGE * PAGE] * 19


def test_a_burst_of_one_prompt_is_computed_once():
    """Eight at once: seven wait for the leader and take over what it computed."""
    scheduler = make(slabs=400, max_model_len=600, max_num_batched_tokens=64)
    for i in range(8):
        add(scheduler, f"r{i}", 301, max_tokens=2)
    finish(scheduler)
    assert scheduler.counters.computed_tokens == 301 + 7 * (301 - 300) + 8
    assert scheduler.counters.cached_tokens == 7 * 300


def test_a_burst_of_siblings_shares_their_fork():
    scheduler = make(slabs=400, max_model_len=600, max_num_batched_tokens=64)
    shared = list(range(1, 201))
    for i in range(5):
        add(scheduler, f"r{i}", [*shared, *[900 + i] * 50], max_tokens=1)
    finish(scheduler)
    assert scheduler.counters.cached_tokens == 4 * 200
    assert scheduler.cache.counters.hits["fork"] == 4


def test_a_follower_does_not_wait_for_one_that_is_cancelled():
    scheduler = make(slabs=400, max_model_len=600, max_num_batched_tokens=16)
    add(scheduler, "leader", 301)
    follower = add(scheduler, "follower", 301, max_tokens=1)
    for _ in range(3):
        assert set(step(scheduler)[0]) == {"leader"}
    scheduler.cancel("leader")
    assert step(scheduler)[0] == {"follower": 16}
    finish(scheduler)
    assert follower.num_output_tokens == 1


def test_followers_do_not_hold_up_others():
    scheduler = make(slabs=400, max_model_len=600, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    add(scheduler, "leader", 301)
    add(scheduler, "follower", 301)
    add(scheduler, "other", [900] * 10)
    assert set(step(scheduler)[0]) == {"leader", "other"}


def test_a_turn_that_repeats_the_answer_goes_on_from_its_end():
    """History word for word: only the new message is computed, wherever in a page the answer ended."""
    scheduler = make(slabs=400, max_model_len=600, max_num_batched_tokens=64)
    history, before = list(range(100, 151)), 0
    for turn in range(6):
        request = add(scheduler, f"t{turn}", history, max_tokens=turn + 3)
        finish(scheduler)
        if turn:
            assert request.num_cached_tokens == before - 1  # the last answer token was never computed
        before = request.num_tokens
        history = [*request.tokens, 60 + turn, 61 + turn]
    assert scheduler.cache.counters.hits["leaf"] + scheduler.cache.counters.hits["tail"] >= 5
