"""Hand-over between two engines of one process: the real scheduler, kernels, connector and shared memory.

One engine computes prompts, the other goes on from there. Answers and log-probabilities equal those of one
engine alone, bit for bit; and whatever happens, both sides' memory returns.
"""

from __future__ import annotations

import functools
import random
import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from checkpoints import VOCAB, checkpoint
from offline import Answer, make_core, run

from plait.core.sampling_params import SamplingParams
from plait.engine.core import EngineCore
from plait.kernels.cpu.native import MISSING, native
from plait.transfer import connect
from plait.transfer.base import TransferError
from plait.transfer.loopback import SharedMemoryWire

pytestmark = [
    pytest.mark.skipif(native is None, reason=f"no CPU kernels: {MISSING}"),
    pytest.mark.usefixtures("cpu_kernels"),
]

FAMILIES = ("llama", "qwen3_5", "qwen3_5_moe")
TOKENS = 12
PAGE = 16
WAYS = (
    SamplingParams(temperature=0, logprobs=2, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=1, max_tokens=TOKENS, ignore_eos=True),
)


@functools.cache
def prompts() -> list[list[int]]:
    """Of 1 token to many pages, to the token around a page's end; the last ones share beginnings."""
    draw = random.Random(11)
    lengths = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 100, 450)
    found = [[draw.randrange(3, VOCAB) for _ in range(n)] for n in lengths]
    return [*found, [*found[-1][:300], 7, 8], [*found[-1][: 20 * PAGE], 9]]


def params(i: int) -> SamplingParams:
    return WAYS[i % 2]


@functools.cache
def expected(family: str) -> list[Answer]:
    """The answers of one engine alone, one by one, without cache."""
    core = make_core(checkpoint(family), enable_prefix_caching=False)
    count = len(prompts())
    return run(core, prompts(), [params(i) for i in range(count)], at_once=1, seeds=range(count))


CONFIG = {"kv_connector": "LoopbackConnector", "kv_role": "kv_both"}


@contextmanager
def engine(family: str, config: dict[str, Any] | None = None, **settings: Any) -> Iterator[EngineCore]:
    core = make_core(checkpoint(family), kv_transfer_config=CONFIG | (config or {}), **settings)
    try:
        yield core
    finally:
        core.close()


@dataclass
class Seen:
    """What an engine has said so far, by request."""

    answers: dict[str, Answer] = field(default_factory=dict)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, core: EngineCore) -> bool:
        """One step of ``core``. Whether it computed anything."""
        outcome = core.step()
        for p in outcome.progress:
            answer = self.answers.setdefault(p.request_id, Answer())
            answer.tokens += p.tokens
            answer.logprobs += p.logprobs
            answer.finish_reason = p.finish_reason
            answer.num_cached_tokens = p.num_cached_tokens
            reply = core.reply(p)
            if reply is not None:
                self.replies[p.request_id] = reply
        self.failed |= outcome.failed
        return not outcome.idle


def step_until(done, *engines: tuple[EngineCore, Seen], seconds: float = 30.0) -> None:
    """Step the engines until ``done()``; sleep on what wakes them when none has anything to compute."""
    last = time.monotonic()
    ends = last + seconds
    while not done():
        busy = [seen.take(core) for core, seen in engines]
        if not any(busy) and not done():
            left = min(core.patience(1.0) for core, _ in engines)
            select.select([core.wake_descriptor for core, _ in engines], [], [], left)
        now = time.monotonic()
        ends += now - last if now - last > 5 else 0  # the machine was suspended
        last = now
        assert now < ends, "it takes too long"


def add(core: EngineCore, name: str, i: int, transfer: dict[str, Any] | None, **more: Any) -> None:
    asked = params(i)
    core.add(
        name,
        prompts()[i],
        asked,
        seed=i,
        max_tokens=asked.max_tokens or 1,
        kv_transfer_params=transfer,
        **more,
    )


def prefill(core: EngineCore, seen: Seen, numbers: Sequence[int], tag: str = "") -> list[dict[str, Any]]:
    """The replies of a prefiller to prompts of these numbers."""
    names = [f"p{tag}{i}" for i in numbers]
    for name, i in zip(names, numbers, strict=True):
        add(core, name, i, {"do_remote_decode": True})
    step_until(lambda: all(name in seen.replies for name in names), (core, seen))
    return [seen.replies[name] for name in names]


def quiet(core: EngineCore) -> bool:
    """No request, lease or fetch holds anything."""
    core.scheduler.check()
    assert core.scheduler.handover is not None
    usage = core.scheduler.cache.usage()
    held = usage["pages_used"] + usage["states_used"] + usage["pages_lent"] + usage["states_lent"]
    return not held and not any(core.scheduler.handover.usage().values())


def same(got: Answer, want: Answer) -> None:
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)
    assert len(got.tokens) == TOKENS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("caching", "ahead"), [(True, False), (False, False), (True, True)], ids=["cached", "uncached", "async"]
)
def test_answers_are_those_of_one_engine(family: str, caching: bool, ahead: bool) -> None:
    """All prompts at once, then again: now either side may know them, in part or in whole."""
    common = {"enable_prefix_caching": caching, "async_scheduling": ahead}
    numbers = range(len(prompts()))
    with (
        engine(family, max_num_batched_tokens=150, **common) as prefiller,
        engine(family, max_num_batched_tokens=90, **common) as decoder,
    ):
        p, d = Seen(), Seen()
        for tag in ("first", "second"):
            for i, reply in zip(numbers, prefill(prefiller, p, numbers, tag), strict=True):
                assert reply["remote_num_tokens"] == len(prompts()[i]) - 1
                assert reply["do_remote_prefill"] is True
                add(decoder, f"{tag}{i}", i, reply)
            names = [f"{tag}{i}" for i in numbers]
            done = lambda: all(n in d.answers and d.answers[n].finish_reason for n in names)  # noqa: B023, E731
            step_until(done, (decoder, d), (prefiller, p))
            for i, name in zip(numbers, names, strict=True):
                same(d.answers[name], expected(family)[i])
        step_until(lambda: quiet(prefiller) and quiet(decoder), (decoder, d), (prefiller, p))
        assert not p.failed
        assert not d.failed
        counters = decoder.scheduler.handover.counters
        assert counters.received + counters.forgone == 2 * (
            len(prompts()) - 1
        )  # one had nothing to hand over
        assert not counters.failed
        if caching:  # the second time the decoder knew all full pages, whether it had a state for them or not
            assert counters.received_tokens < 2 * sum(len(x) for x in prompts()) / 1.7
        assert prefiller.scheduler.counters.generated_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_not_known_is_fetched(family: str) -> None:
    """A decoder that holds the pages of a shared beginning has the rest of them sent, and the state."""
    with engine(family) as prefiller, engine(family) as decoder:
        p, d = Seen(), Seen()
        add(decoder, "before", 8, None)  # 450 tokens, of which the prompt below has the first 300
        answer(d, "before", (decoder, d))
        [reply] = prefill(prefiller, p, [9])
        add(decoder, "x", 9, reply)
        same(answer(d, "x", (decoder, d)), expected(family)[9])
        known = 300 // PAGE * PAGE
        assert decoder.scheduler.handover.counters.received_tokens == len(prompts()[9]) - 1 - known
        assert d.answers["x"].num_cached_tokens == known
        step_until(lambda: quiet(prefiller) and quiet(decoder), (decoder, d), (prefiller, p))


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8", "block_size": 48},
        {"kv_cache_dtype": "fp8", "quantization": "int4"},
        {"enable_chunked_prefill": False, "kv_cache_dtype": "bfloat16"},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_other_formats(settings: dict[str, Any]) -> None:
    """Whatever pages and weights are made of: the bits are those of one engine with the same settings."""
    alone = make_core(checkpoint("qwen3_5"), enable_prefix_caching=False, **settings)
    numbers = [4, 7, 8]
    want = run(alone, [prompts()[i] for i in numbers], [params(i) for i in numbers], at_once=1, seeds=numbers)
    with engine("qwen3_5", **settings) as prefiller, engine("qwen3_5", **settings) as decoder:
        p, d = Seen(), Seen()
        for i, reply in zip(numbers, prefill(prefiller, p, numbers), strict=True):
            add(decoder, f"d{i}", i, reply)
        for i, alike in zip(numbers, want, strict=True):
            same(answer(d, f"d{i}", (decoder, d), (prefiller, p)), alike)
        assert decoder.scheduler.handover.counters.received == len(numbers)


def answer(seen: Seen, name: str, *engines: tuple[EngineCore, Seen]) -> Answer:
    """The answer to a request, when it has ended."""
    step_until(lambda: name in seen.answers and seen.answers[name].finish_reason is not None, *engines)
    return seen.answers[name]


def test_answers_share_a_lease() -> None:
    """Two requests that go on from one prompt: it is kept until both have it."""
    with engine("qwen3_5") as prefiller, engine("qwen3_5") as decoder:
        p, d = Seen(), Seen()
        [reply] = prefill(prefiller, p, [8])
        add(decoder, "a", 8, reply)
        add(decoder, "b", 8, reply)
        for name in "ab":
            same(answer(d, name, (decoder, d), (prefiller, p)), expected("qwen3_5")[8])
        assert decoder.scheduler.handover.counters.received == 2
        step_until(lambda: quiet(prefiller), (decoder, d), (prefiller, p))
        assert prefiller.scheduler.handover.counters.returned == {"released": 1}


def test_prompt_log_probabilities_need_no_hand_over() -> None:
    """Scores of a prompt need all of it computed where they are asked for."""
    with engine("qwen3_5") as prefiller, engine("qwen3_5") as decoder:
        p, d = Seen(), Seen()
        scored = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=2, ignore_eos=True)
        prefiller.add(
            "p", prompts()[7], scored, seed=0, max_tokens=2, kv_transfer_params={"do_remote_decode": True}
        )
        step_until(lambda: "p" in p.replies, (prefiller, p))
        decoder.add("d", prompts()[7], scored, seed=0, max_tokens=2, kv_transfer_params=p.replies["p"])
        scores = []
        while decoder.has_work:
            for progress in decoder.step().progress:
                scores += progress.prompt_logprobs or ()
        assert len(scores) == len(prompts()[7]) - 1
        step_until(lambda: quiet(prefiller) and quiet(decoder), (decoder, d), (prefiller, p))


# -- endings ------------------------------------------------------------------------------------


def test_short_memory_on_both_sides() -> None:
    """Arenas that hold little more than the longest prompt: leases and fetches wait for room, or evict."""
    geometry = make_core(checkpoint("qwen3_5")).scheduler.cache.geometry
    slabs = geometry.slabs_for(470) + geometry.slabs_for(120)
    numbers = [8, 7, 9, 6, 10, 5, 8, 7]
    with engine("qwen3_5", slabs=slabs) as prefiller, engine("qwen3_5", slabs=slabs) as decoder:
        p, d = Seen(), Seen()
        waiting = list(enumerate(numbers))
        for k, i in waiting:
            add(prefiller, f"p{k}", i, {"do_remote_decode": True})
        routed: set[int] = set()

        def route() -> bool:
            for k, i in waiting:
                if f"p{k}" in p.replies and k not in routed:
                    routed.add(k)
                    add(decoder, f"d{k}", i, p.replies[f"p{k}"])
            prefiller.scheduler.check()
            decoder.scheduler.check()
            return all(f"d{k}" in d.answers and d.answers[f"d{k}"].finish_reason for k, _ in waiting)

        step_until(route, (prefiller, p), (decoder, d))
        for k, i in waiting:
            same(d.answers[f"d{k}"], expected("qwen3_5")[i])
        step_until(lambda: quiet(prefiller) and quiet(decoder), (decoder, d), (prefiller, p))
        assert prefiller.scheduler.cache.counters.pages_evicted > 0
        assert decoder.scheduler.cache.counters.pages_evicted > 0


@pytest.mark.parametrize("mode", ["recompute", "swap", "swap, async"])
def test_preempted_after_the_hand_over(mode: str) -> None:
    """Long answers in an arena for few: what is preempted is computed anew, or swapped in, to equal bits."""
    asked = SamplingParams(temperature=0.8, logprobs=1, max_tokens=90, ignore_eos=True)
    geometry = make_core(checkpoint("qwen3_5")).scheduler.cache.geometry
    alone = make_core(checkpoint("qwen3_5"), enable_prefix_caching=False)
    want = run(alone, [prompts()[7]] * 5, asked, at_once=1, seeds=range(5))
    slabs = 3 * geometry.slabs_for(100 + 50)
    settings = {"swap_slabs": slabs, "preemption_mode": "swap"} if "swap" in mode else {}
    settings["async_scheduling"] = "async" in mode
    with engine("qwen3_5") as prefiller, engine("qwen3_5", slabs=slabs, **settings) as decoder:
        p, d = Seen(), Seen()
        for i in range(5):
            [reply] = prefill(prefiller, p, [7], f"{i}-")
            decoder.add(f"d{i}", prompts()[7], asked, seed=i, max_tokens=90, kv_transfer_params=reply)
        got = [answer(d, f"d{i}", (decoder, d), (prefiller, p)) for i in range(5)]
        assert [(a.tokens, a.logprobs) for a in got] == [(a.tokens, a.logprobs) for a in want]
        assert decoder.scheduler.counters.preemptions > 0
        assert decoder.scheduler.handover.counters.received > 0
        if "swap" in mode:
            assert decoder.swap.counters.resumed > 0
        step_until(lambda: quiet(prefiller) and quiet(decoder), (decoder, d), (prefiller, p))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_dead_prefiller(policy: str) -> None:
    with engine("qwen3_5", {"kv_load_failure_policy": policy}) as decoder:
        p, d = Seen(), Seen()
        with engine("qwen3_5") as prefiller:
            [reply] = prefill(prefiller, p, [8])
        add(decoder, "x", 8, reply)
        if policy == "recompute":
            same(answer(d, "x", (decoder, d)), expected("qwen3_5")[8])
        else:
            step_until(lambda: "x" in d.failed, (decoder, d))
            assert str(reply["remote_port"]) in d.failed["x"]
        step_until(lambda: quiet(decoder), (decoder, d))


def test_a_dead_decoder() -> None:
    """Its leases end with it, long before they would expire."""
    gate = threading.Event()
    with engine("qwen3_5") as prefiller:
        p, d = Seen(), Seen()
        [reply] = prefill(prefiller, p, [8])
        with stalled("qwen3_5", gate) as (decoder, wire):
            add(decoder, "x", 8, reply)
            step_until(wire.reading.is_set, (decoder, d))
            assert not quiet(prefiller)
            gate.set()
        step_until(lambda: quiet(prefiller), (prefiller, p))
        assert set(prefiller.scheduler.handover.counters.returned) <= {"lost", "released"}


def test_a_lease_nobody_comes_for_expires() -> None:
    short = {"kv_connector_extra_config": {"lease_seconds": 0.05}}
    with engine("qwen3_5", short) as prefiller, engine("qwen3_5") as decoder:
        p, d = Seen(), Seen()
        [reply] = prefill(prefiller, p, [8])
        step_until(lambda: quiet(prefiller), (prefiller, p))
        assert prefiller.scheduler.handover.counters.returned == {"expired": 1}
        add(decoder, "late", 8, reply)
        same(answer(d, "late", (decoder, d)), expected("qwen3_5")[8])
        assert decoder.scheduler.handover.counters.failed == 1


def test_leases_that_wait_for_their_turn_are_kept() -> None:
    """A decoder that is full asks the prefiller to keep what it has not fetched, for longer than a lease."""
    short = {"kv_connector_extra_config": {"lease_seconds": 1.5}}
    quick = {"kv_connector_extra_config": {"fetch_seconds": 3.0}}
    with engine("qwen3_5", short) as prefiller, engine("qwen3_5", quick, max_num_seqs=1) as decoder:
        p, d = Seen(), Seen()
        long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        decoder.add("local", prompts()[6], long, seed=0, max_tokens=3000)
        for i, reply in zip((7, 8), prefill(prefiller, p, [7, 8]), strict=True):
            add(decoder, f"d{i}", i, reply)
        received = decoder.scheduler.handover.counters
        step_until(lambda: received.received == 1, (decoder, d), (prefiller, p))
        later = time.monotonic() + 3.0

        def over() -> bool:
            time.sleep(0.01)  # so that what runs here outlasts the lease, however fast the kernels are
            return time.monotonic() > later

        step_until(over, (decoder, d), (prefiller, p))
        assert received.received == 1  # one lies ready, the other has no room
        assert decoder.cancel("local")
        for i in (7, 8):
            same(answer(d, f"d{i}", (decoder, d), (prefiller, p)), expected("qwen3_5")[i])
        assert decoder.scheduler.handover.counters.failed == 0
        step_until(lambda: quiet(prefiller), (decoder, d), (prefiller, p))


def test_a_client_that_goes_before_it_is_told() -> None:
    """Its prompt is computed but not yet offered, or offered and the reply not delivered."""
    with engine("qwen3_5") as prefiller:
        p = Seen()
        add(prefiller, "early", 8, {"do_remote_decode": True})
        assert prefiller.cancel("early")
        prefill(prefiller, p, [7])
        assert prefiller.cancel("p7")
        assert not prefiller.cancel("p7")
        assert quiet(prefiller)


class StalledWire(SharedMemoryWire):
    """Reads only when the gate is open: a link that goes silent and delivers in the end."""

    gate: threading.Event

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reading = threading.Event()

    def _copy(self, data, spans, stop) -> None:
        self.reading.set()
        self.gate.wait()
        super()._copy(data, spans, lambda: False)  # nothing can recall what the network has


@contextmanager
def stalled(
    family: str, gate: threading.Event, config: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[EngineCore, StalledWire]]:
    kind = type("Stalled", (StalledWire,), {"gate": gate})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connect.CONNECTORS, "LoopbackConnector", kind)
        with engine(family, config, **settings) as core:
            try:
                yield core, core.connector.worker.wire
            finally:
                gate.set()


SOON = {"kv_connector_extra_config": {"fetch_seconds": 1.5}}


def test_a_silent_link_holds_nobody_up_and_its_memory_is_not_used_again_before_it_is_over() -> None:
    gate = threading.Event()
    with engine("qwen3_5") as prefiller, stalled("qwen3_5", gate, SOON, max_num_seqs=1) as (decoder, wire):
        p, d = Seen(), Seen()
        replies = prefill(prefiller, p, [8, 7])
        add(decoder, "x", 8, replies[0])
        step_until(wire.reading.is_set, (decoder, d))
        add(decoder, "local", 6, None)  # with room for one that runs, beside the one that waits
        same(answer(d, "local", (decoder, d)), expected("qwen3_5")[6])
        same(answer(d, "x", (decoder, d)), expected("qwen3_5")[8])
        usage = decoder.scheduler.handover.usage()
        assert usage["pages_quarantined"] == 29
        assert usage["states_quarantined"] == 1
        add(decoder, "other", 9, None)
        same(answer(d, "other", (decoder, d)), expected("qwen3_5")[9])
        decoder.scheduler.check()
        gate.set()
        step_until(lambda: quiet(decoder), (decoder, d))
        add(decoder, "next", 7, replies[1])
        same(answer(d, "next", (decoder, d), (prefiller, p)), expected("qwen3_5")[7])
        counters = decoder.scheduler.handover.counters
        assert (counters.failed, counters.received) == (1, 1)
        step_until(lambda: quiet(prefiller), (prefiller, p), (decoder, d))


def test_a_client_that_goes_while_its_prompt_is_on_its_way() -> None:
    gate = threading.Event()
    with engine("qwen3_5") as prefiller, stalled("qwen3_5", gate) as (decoder, wire):
        p, d = Seen(), Seen()
        [reply] = prefill(prefiller, p, [8])
        add(decoder, "x", 8, reply)
        step_until(wire.reading.is_set, (decoder, d))
        assert decoder.cancel("x")
        assert decoder.scheduler.handover.usage()["pages_quarantined"] == 29
        step_until(
            lambda: quiet(prefiller), (prefiller, p)
        )  # the prefiller need not wait for the silent link
        gate.set()
        step_until(lambda: quiet(decoder), (decoder, d))


def test_a_wire_that_breaks() -> None:
    class BreakingWire(SharedMemoryWire):
        def _copy(self, data, spans, stop) -> None:
            super()._copy(data, spans[: len(spans) // 2], stop)
            raise TransferError("the cable was cut")

    with engine("qwen3_5") as prefiller, pytest.MonkeyPatch.context() as patch:
        patch.setitem(connect.CONNECTORS, "LoopbackConnector", BreakingWire)
        with engine("qwen3_5") as decoder:
            p, d = Seen(), Seen()
            [reply] = prefill(prefiller, p, [8])
            add(decoder, "x", 8, reply)
            same(answer(d, "x", (decoder, d)), expected("qwen3_5")[8])
            step_until(lambda: quiet(decoder) and quiet(prefiller), (decoder, d), (prefiller, p))


# -- engines that do not fit together ------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"block_size": 32}, "pages of 32 tokens there, of 16 here"),
        ({"kv_cache_dtype": "int8"}, "other bits"),
    ],
)
def test_engines_that_differ_exchange_nothing(settings: dict[str, Any], why: str) -> None:
    with (
        engine("qwen3_5") as prefiller,
        engine("qwen3_5", {"kv_load_failure_policy": "fail"}, **settings) as decoder,
    ):
        p, d = Seen(), Seen()
        [reply] = prefill(prefiller, p, [8])
        add(decoder, "x", 8, reply)
        step_until(lambda: "x" in d.failed, (decoder, d))
        assert why in d.failed["x"]


def test_other_weights_exchange_nothing() -> None:
    strange = make_core(
        checkpoint("qwen3_5", seed=5), kv_transfer_config=CONFIG | {"kv_load_failure_policy": "fail"}
    )
    try:
        with engine("qwen3_5") as prefiller:
            p, d = Seen(), Seen()
            [reply] = prefill(prefiller, p, [8])
            add(strange, "x", 8, reply)
            step_until(lambda: "x" in d.failed, (strange, d))
            assert "other bits" in d.failed["x"]
    finally:
        strange.close()


def test_the_memory_of_another_prompt_is_not_taken() -> None:
    """A client that mixes up replies gets the answer to the prompt it sent."""
    with engine("qwen3_5") as prefiller, engine("qwen3_5") as decoder:
        p, d = Seen(), Seen()
        [reply] = prefill(prefiller, p, [8])
        other = [*prompts()[8][:-5], 9, 9, 9, 9, 9]
        want = run(make_core(checkpoint("qwen3_5")), [other], params(8), seeds=[8])[0]
        decoder.add("x", other, params(8), seed=8, max_tokens=TOKENS, kv_transfer_params=reply)
        same(answer(d, "x", (decoder, d)), want)
        assert decoder.scheduler.handover.counters.failed == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_num_tokens": 450}, "send both engines the same prompt"),
        ({"remote_port": "80"}, "wrong type"),
        ({"remote_port": 0}, "no port"),
        ({"remote_host": "192.0.2.1"}, "another machine"),
        ({"remote_engine_id": None}, "remote_engine_id is missing"),
        ({"do_remote_decode": True}, "exclude each other"),
        ({"remote_color": "red"}, "unknown field"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    reply = {
        "do_remote_prefill": True, "remote_engine_id": "a", "remote_request_id": "b", "remote_port": 9,
        "remote_host": "127.0.0.1", "remote_num_tokens": 449, "remote_block_ids": [1],
    }  # fmt: skip
    with engine("llama") as core, pytest.raises(ValueError, match=message):
        add(core, "x", 8, reply | changes)


def test_roles_and_engines_without_a_connector() -> None:
    with engine("llama", {"kv_role": "kv_consumer"}) as core, pytest.raises(ValueError, match="kv_consumer"):
        add(core, "x", 8, {"do_remote_decode": True})
    core = make_core(checkpoint("llama"))
    with pytest.raises(ValueError, match="kv-transfer-config"):
        add(core, "x", 8, {"do_remote_decode": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "is an object such as"),
        ({"kv_connector": "NixlConnector"}, "choose one of LoopbackConnector"),
        ({**CONFIG, "kv_role": "both"}, "choose one of kv_producer"),
        ({**CONFIG, "kv_rank": 1}, "choose one of kv_connector, kv_role"),
        ({**CONFIG, "kv_port": 70000}, "is no port"),
        ({**CONFIG, "kv_ip": "0.0.0.0"}, "peers are told"),
        ({**CONFIG, "kv_ip": "198.51.100.1"}, "cannot listen on"),
        ({**CONFIG, "kv_connector_extra_config": {"lease_seconds": 0}}, "above 0"),
    ],
)
def test_settings_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_core(checkpoint("llama"), kv_transfer_config=given)
