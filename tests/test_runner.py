"""The runner with real random checkpoints: how a step is composed must not show in the answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, oracle_greedy, oracle_logits
from driver import PAGE_SIZE, Asked, Driver, make_worker

from plait.core.geometry import Geometry
from plait.core.plan import Admission, Chunk, Copy, Export, Kind, StepPlan
from plait.core.sampling_params import SamplingParams
from plait.kernels.batch import Batch
from plait.models.registry import config_from_folder
from plait.models.sources import DummySource
from plait.worker.arena import Arena
from plait.worker.batching import PlanError
from plait.worker.runner import BadLogits, ModelRunner
from plait.worker.worker import Worker, activation_bytes, plan_layout

torch.set_num_threads(1)

FAMILIES = ["qwen3_5", "llama"]


def tokens(count: int, seed: int) -> tuple[int, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 997, (count,), generator=g).tolist())


def asked(name: str, length: int, seed: int = 0, **params: Any) -> Asked:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "logprobs": 2}
    return Asked(name, tokens(length, seed), SamplingParams(**defaults | params), seed)


def mixed() -> list[Asked]:
    """Greedy and drawn, short and long, penalised and scored."""
    return [
        asked("a", 37, 1),
        asked("b", 5, 2, temperature=1.0, top_k=50, presence_penalty=1.0, repetition_penalty=1.2),
        asked("c", 61, 3, temperature=0.8, top_p=0.9, max_tokens=9),
        asked("d", 1, 4, temperature=1.3, min_p=0.01),
        asked("e", 33, 5, prompt_logprobs=2, max_tokens=2),
    ]


@pytest.fixture(params=FAMILIES)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    worker = make_worker(checkpoint(request.param), slabs=128)
    yield Driver(worker)
    worker.close()


@pytest.fixture
def hybrid() -> Iterator[Driver]:
    worker = make_worker(checkpoint("qwen3_5"), slabs=128)
    yield Driver(worker)
    worker.close()


def assert_same(ours: list[Asked], theirs: list[Asked]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.answer == b.answer
        for x, y in zip(a.logprobs + a.prompt_logprobs, b.logprobs + b.prompt_logprobs, strict=True):
            assert [(t, rank) for t, _, rank in x] == [(t, rank) for t, _, rank in y]
            assert [p for _, p, _ in x] == pytest.approx([p for _, p, _ in y], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_the_oracle(family: str) -> None:
    worker = make_worker(checkpoint(family))
    request = asked("a", 37, 1, max_tokens=8, prompt_logprobs=0)
    Driver(worker).run([request], chunk=16)
    assert request.answer == oracle_greedy(checkpoint(family), request.prompt, 8)
    expected = oracle_logits(checkpoint(family), request.tokens).log_softmax(-1)
    scored = request.prompt_logprobs + request.logprobs
    assert len(scored) == len(request.tokens) - 1
    for position, entry in enumerate(scored):
        token, logprob, rank = entry[0]
        assert token == request.tokens[position + 1]
        assert logprob == pytest.approx(float(expected[position, token]), abs=2e-3)
        assert abs(rank - 1 - int((expected[position] > expected[position, token]).sum())) <= 1


@pytest.mark.parametrize(("chunk", "late"), [(16, 0), (7, 0), (1, 0), (16, 2)])
def test_chunks_and_arrivals_do_not_show(driver: Driver, chunk: int, late: int) -> None:
    grid = driver.geometry.state_grid
    if chunk % grid:
        pytest.skip(f"the backend ends chunks at multiples of {grid}")
    alone = mixed()
    for request in alone:
        driver.run([request])
    together = mixed()
    driver.run(together, chunk, late)
    assert_same(together, alone)


def test_preemption_resumes_the_same_answer(driver: Driver) -> None:
    whole = mixed()
    driver.run(whole)
    for request in whole:
        cut = dataclasses.replace(request, answer=request.answer[:1], logprobs=request.logprobs[:1], start=0)
        cut.prompt_logprobs = []
        driver.place(cut, len(request.tokens))
        driver.step(admitted=[Asked(cut.request_id, cut.prompt, cut.params, 99).admission()])
        ended: tuple[str, ...] = (cut.request_id,)  # ended and admitted again in one step
        while len(cut.answer) < len(request.answer):
            chunk = cut.chunk(10_000)
            admitted = [cut.admission()] if ended else []
            result = driver.step([chunk], ended=ended, admitted=admitted)
            ended = ()
            cut.take(chunk, result.results[0])
        driver.step(ended=[cut.request_id])
        assert_same([cut], [request])


def test_a_snapshot_and_its_pages_continue_a_prefix(hybrid: Driver) -> None:
    at, g = 2 * PAGE_SIZE, hybrid.geometry
    cold = asked("cold", 45, 7)
    hybrid.place(cold, 60)
    exported, copied = (hybrid.take_slabs(1) * g.slab_states for _ in range(2))
    chunk = cold.chunk(100, (Export(at, exported),))
    cold.take(chunk, hybrid.step([chunk], admitted=[cold.admission()]).results[0])

    warm = Asked("warm", cold.prompt, cold.params, start=at)
    hybrid.place(warm, 60)
    warm.pages = (*cold.pages[:1], *warm.pages[1:])  # the first page is read in place, the second from a copy
    chunk = warm.chunk(100)
    copies = [
        Copy(Kind.STATE, exported, copied),
        Copy(Kind.STATE, copied, warm.slot or 0),  # reads what the copy before it wrote
        Copy(Kind.PAGE, cold.pages[1], warm.pages[1]),
    ]
    warm.take(chunk, hybrid.step([chunk], admitted=[warm.admission()], copies=copies).results[0])
    assert_same([warm], [cold])


def test_an_export_equals_the_state_of_a_shorter_run(hybrid: Driver) -> None:
    g, at = hybrid.geometry, PAGE_SIZE
    request = asked("a", 40, 8)
    hybrid.place(request, 50)
    first, second = (hybrid.take_slabs(1) * g.slab_states for _ in range(2))
    exports = (Export(40, second), Export(at, first))  # in any order
    hybrid.step([request.chunk(100, exports)], admitted=[request.admission()])
    assert torch.equal(hybrid.worker.arena.state(second), hybrid.worker.arena.state(request.slot or 0))
    hybrid.step([dataclasses.replace(request.chunk(at), sample=False)], ended=["a"],
                admitted=[request.admission()])  # fmt: skip
    conv = hybrid.worker.arena.state(request.slot or 0).view(torch.float32)
    torch.testing.assert_close(hybrid.worker.arena.state(first).view(torch.float32), conv,
                               rtol=1e-4, atol=1e-5, equal_nan=True)  # fmt: skip


def test_prompt_scores_skip_answer_tokens_when_resumed(driver: Driver) -> None:
    request = asked("a", 20, 9, prompt_logprobs=0, max_tokens=8)
    driver.run([request])
    assert len(request.prompt_logprobs) == 19
    again = Asked("a", request.prompt, request.params, answer=request.answer[:5])
    driver.place(again, 40)
    chunk = again.chunk(100)
    again.take(chunk, driver.step([chunk], admitted=[again.admission()]).results[0])
    assert again.answer == request.answer[:6]
    assert_same([dataclasses.replace(again, logprobs=[], answer=[])],
                [dataclasses.replace(request, logprobs=[], answer=[])])  # fmt: skip


# With a toy model: what reaches the model, and what is refused.


class Toy:
    """Logits that prefer token + 1; rows after a token in ``poisoned`` are NaN. Remembers its batches."""

    def __init__(self, poisoned: tuple[int, ...] = ()) -> None:
        self.poisoned = torch.tensor(poisoned, dtype=torch.int64)
        self.batches: list[Batch] = []

    def forward(self, batch: Batch, caches: object) -> torch.Tensor:
        self.batches.append(batch)
        ids = batch.token_ids[batch.logit_rows]
        logits = torch.nn.functional.one_hot((ids + 1) % 50, 50).float()
        logits[torch.isin(ids, self.poisoned)] = math.nan
        return logits


def toy(model: Toy, state_bytes: int = 100) -> ModelRunner:
    arena = Arena(Geometry(16, 128, state_bytes, 1, 128 * 20))
    caches: Any = None
    return ModelRunner(model, caches, arena, vocab_size=50, device="cpu")


def greedy(name: str, ids: tuple[int, ...], prompt: int | None = None, **params: Any) -> Admission:
    settings = SamplingParams(temperature=0.0, **params)
    return Admission(name, settings, 0, ids, len(ids) if prompt is None else prompt)


def test_the_batch_that_models_see() -> None:
    model = Toy()
    runner = toy(model)
    a, b = greedy("a", (1, 2, 3, 4)), greedy("b", tuple(range(20)), prompt_logprobs=0)
    first = Chunk("b", tuple(range(18)), 0, (4, 5, 6), 3)
    runner.execute(StepPlan(1, (first,), admitted=(b,)))
    chunks = (
        Chunk("a", (1, 2, 3, 4), 0, (7,), 8, (Export(4, 9), Export(1, 2)), sample=True),
        Chunk("b", (18, 19), 18, (4, 5), 3, sample=True),
    )
    result = runner.execute(StepPlan(2, chunks, admitted=(a,)))
    seen = model.batches[1]
    assert seen.token_ids.tolist() == [1, 2, 3, 4, 18, 19]
    assert seen.positions.tolist() == [0, 1, 2, 3, 18, 19]
    assert seen.query_start.tolist() == list(seen.query_start_host) == [0, 4, 6]
    assert seen.context_lens.tolist() == list(seen.context_lens_host) == [0, 18]
    assert seen.page_table.tolist() == [[7, 0], [4, 5]]
    assert seen.slots.tolist() == list(seen.slots_host) == [8, 3]
    assert seen.exports == ((0, 1, 2), (0, 4, 9))
    assert seen.logit_rows.tolist() == [3, 4, 5]
    assert (seen.token_ids.dtype, seen.page_table.dtype) == (torch.int64, torch.int32)
    assert [r.tokens for r in result.results] == [(5,), (20,)]
    assert [e[0][0] for e in result.results[1].prompt_logprobs] == [19]
    assert model.batches[0].logit_rows.tolist() == list(range(18))


def test_bad_logits_spare_the_others_of_the_step() -> None:
    runner = toy(Toy(poisoned=(7,)))
    admitted = (greedy("a", (1, 2)), greedy("b", (6, 7)), greedy("c", (7, 3), prompt_logprobs=0))
    chunks = tuple(Chunk(r.request_id, r.tokens, 0, (i,), 5 + i, sample=True) for i, r in enumerate(admitted))
    with pytest.raises(BadLogits, match="step 1: no token for b, c") as caught:
        runner.execute(StepPlan(1, chunks, admitted=admitted))
    assert caught.value.request_ids == ("b", "c")
    assert [r.tokens for r in caught.value.result.results] == [(3,), (), ()]
    again = Chunk("a", (3,), 2, (0,), 5, sample=True)
    assert runner.execute(StepPlan(2, (again,), ended=("b", "c"))).results[0].tokens == (4,)


def test_steps_are_prepared_on_tokens_still_to_come() -> None:
    """Two steps ahead: the tokens are filled in, and penalties count them, when the step runs."""
    model = Toy()
    runner = toy(model)
    bias = {20: 0.5, 21: 0.4}
    a, b = greedy("a", (1, 2)), greedy("b", (18,), logit_bias=bias, presence_penalty=2.0)
    first = (Chunk("a", (1, 2), 0, (0,), 5, sample=True), Chunk("b", (18,), 0, (1,), 6, sample=True))
    plans = [StepPlan(1, first, admitted=(a, b))]
    for step, (at, bt) in ((2, (2, 1)), (3, (3, 2))):
        chunks = (
            Chunk("b", (), bt, (1,), 6, sample=True, awaited=1),
            Chunk("a", (), at, (0,), 5, sample=True, awaited=1),
        )
        plans.append(StepPlan(step, chunks))
    prepared = [runner.prepare(plan) for plan in plans]
    results = [runner.run(step).results for step in prepared]
    assert [[r.tokens for r in step] for step in results] == [[(3,), (19,)], [(20,), (4,)], [(21,), (5,)]]
    assert [batch.token_ids.tolist() for batch in model.batches] == [[1, 2, 18], [19, 3], [20, 4]]


def test_a_request_that_failed_is_left_out_of_steps_under_way() -> None:
    runner = toy(Toy(poisoned=(7,)))
    a, b = greedy("a", (1, 2)), greedy("b", (6, 7))
    chunks = tuple(Chunk(r.request_id, r.tokens, 0, (i,), 5 + i, sample=True) for i, r in enumerate((a, b)))
    ahead = tuple(Chunk(name, (), 2, (i,), 5 + i, sample=True, awaited=1) for i, name in enumerate("ab"))
    first, second = runner.prepare(StepPlan(1, chunks, admitted=(a, b))), runner.prepare(StepPlan(2, ahead))
    with pytest.raises(BadLogits, match="step 1: no token for b"):
        runner.run(first)
    assert [r.tokens for r in runner.run(second).results] == [(4,), ()]


def test_tokens_that_nobody_samples_are_not_awaited() -> None:
    runner = toy(Toy())
    chunk = Chunk("a", (1, 2), 0, (0,), 5)
    runner.execute(StepPlan(1, (chunk,), admitted=(greedy("a", (1, 2)),)))
    with pytest.raises(PlanError, match="awaits a token at 2; 2 are to be had by then"):
        runner.prepare(StepPlan(2, (Chunk("a", (), 2, (0,), 5, sample=True, awaited=1),)))
    late = toy(Toy())
    late.prepare(StepPlan(1, (dataclasses.replace(chunk, sample=True),), admitted=(greedy("a", (1, 2)),)))
    step = late.prepare(StepPlan(2, (Chunk("a", (), 2, (0,), 5, sample=True, awaited=1),)))
    with pytest.raises(PlanError, match="step 2 runs before request 'a' has its token"):
        late.run(step)


SOUND = Chunk("a", (1, 2, 3), 0, (0,), 5, sample=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": "z"}, "'z' comes before its admission"),
        ({"tokens": ()}, "has 0 tokens"),
        ({"start": -1}, "from -1"),
        ({"tokens": (1, 2, 4)}, "differ from the 3 tokens"),
        ({"tokens": (1, 2)}, "samples at position 2, but 3 is next"),
        ({"pages": ()}, "has 0 pages; 3 positions need 1"),
        ({"pages": (20,)}, "pages run from 20 to 20; the arena holds 20"),
        ({"slot": None}, "has slot None; the model has a state"),
        ({"slot": 20}, r"uses states \[20\]"),
        ({"exports": (Export(2, 5),)}, r"uses states \[5, 5\]; they must differ"),
        ({"exports": (Export(0, 6),)}, r"cannot export at \[0\]"),
        ({"exports": (Export(4, 6),)}, r"cannot export at \[4\]"),
    ],
)
def test_unsound_chunks_are_refused(change: dict[str, Any], message: str) -> None:
    runner = toy(Toy())
    chunk = dataclasses.replace(SOUND, **change)
    with pytest.raises(PlanError, match=message):
        runner.execute(StepPlan(1, (chunk,), admitted=(greedy("a", (1, 2, 3)),)))


def test_unsound_plans_are_refused() -> None:
    admission = greedy("a", (1, 2, 3))
    with pytest.raises(PlanError, match="step 2 was planned, but step 1 is next"):
        toy(Toy()).execute(StepPlan(2, ()))
    with pytest.raises(PlanError, match="ends request 'b', which is not admitted"):
        toy(Toy()).execute(StepPlan(1, (), ended=("b",)))
    with pytest.raises(PlanError, match="admitted already"):
        toy(Toy()).execute(StepPlan(1, (), admitted=(admission, admission)))
    with pytest.raises(PlanError, match="4 prompt tokens among 3"):
        toy(Toy()).execute(StepPlan(1, (), admitted=(greedy("a", (1, 2, 3), prompt=4),)))
    with pytest.raises(PlanError, match="comes twice"):
        toy(Toy()).execute(StepPlan(1, (SOUND, SOUND), admitted=(admission,)))
    chunk = Chunk("a", (1, 50), 0, (0,), 5, sample=True)
    with pytest.raises(PlanError, match=r"'a' has token ids outside 0 .. 49"):
        toy(Toy()).execute(StepPlan(1, (chunk,), admitted=(greedy("a", (1, 50)),)))
    with pytest.raises(PlanError, match="the model has no state"):
        toy(Toy(), state_bytes=0).execute(StepPlan(1, (SOUND,), admitted=(admission,)))


# The worker


def test_worker_goes_through_its_stages_once() -> None:
    config = config_from_folder(checkpoint("llama"))
    layout = plan_layout(config, page_size=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="give a source"):
        Worker.load(config, dtype=torch.float32, layout=layout)
    worker = Worker.load(config, DummySource(config), dtype=torch.float32, layout=layout)
    assert worker.weight_bytes > 0
    assert worker.geometry is None
    with pytest.raises(RuntimeError, match="allocate"):
        worker.execute(StepPlan(1, ()))
    with pytest.raises(RuntimeError, match="allocate"):
        _ = worker.arena
    geometry = worker.allocate(10 * layout.page_bytes)
    assert geometry.num_pages == 10
    assert worker.execute(StepPlan(1, ())).results == ()
    with pytest.raises(RuntimeError, match="already"):
        worker.allocate(1 << 20)
    worker.close()
    with pytest.raises(RuntimeError, match="allocate"):
        worker.execute(StepPlan(2, ()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rehearsal_leaves_no_trace(family: str) -> None:
    worker = make_worker(checkpoint(family), slabs=16)
    assert worker.geometry is not None
    assert worker.rehearse(33) == 33
    assert worker.rehearse(10**6) == worker.geometry.longest_request()
    request = asked("rehearsal", 20, 3)
    Driver(worker).run([request])
    assert request.answer == oracle_greedy(checkpoint(family), request.prompt, 6)


def test_activation_bytes_grow_with_what_they_count() -> None:
    config = config_from_folder(checkpoint("qwen3_5"))
    sizes = {"tokens": 100, "logit_rows": 8, "dtype": torch.float32}
    base = activation_bytes(config, **sizes)
    per_token = activation_bytes(config, **sizes | {"tokens": 101}) - base
    assert per_token > 4 * (config.hidden_size + 3 * config.intermediate_size)
    assert activation_bytes(config, **sizes | {"logit_rows": 9}) - base >= 4 * config.vocab_size
    moe = config_from_folder(checkpoint("qwen3_5_moe"))
    assert activation_bytes(moe, **sizes) > 0
