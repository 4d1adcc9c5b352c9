"""Every family against transformers in float32: whole prompts, chunks, mixed batches, resumed states."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, VOCAB, checkpoint, oracle_greedy, oracle_logits
from steps import Harness, Stream

from plait.kernels.cpu.native import native
from plait.kernels.registry import get_backend
from plait.models.registry import config_from_folder, load_model
from plait.models.sources import SafetensorsSource

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129, 200, 257, 333, 700)
TOLERANCE = 1e-4
"""Largest difference of logits over the largest logit."""

BACKENDS = ("reference", *(["cpu"] if native else []))
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def loaded(family: str, backend: str) -> Any:
    folder = checkpoint(family)
    config = config_from_folder(folder)
    layout, source = config.cache_layout(32, dtype=torch.float32), SafetensorsSource(folder)
    return load_model(
        config, source, dtype=torch.float32, device="cpu", backend=get_backend(backend), layout=layout
    )


def harness(family: str, backend: str, **options: Any) -> Harness:
    model = loaded(family, backend)
    return Harness(model, model.layout, **options)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    draw = random.Random(5)
    return tuple(tuple(draw.randrange(3, VOCAB) for _ in range(length)) for length in LENGTHS)


@functools.cache
def expected(family: str, tokens: tuple[int, ...]) -> torch.Tensor:
    return oracle_logits(checkpoint(family), tokens)


def error(family: str, stream: Stream, first: int = 0) -> float:
    """Relative error of a stream's logits; ``first``: the position of the first of them."""
    ours = torch.cat(stream.logits)
    truth = expected(family, tuple(stream.tokens))[first : first + len(ours)]
    assert torch.isfinite(ours).all()
    return ((ours - truth).abs().max() / truth.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
@backends
def test_logits_of_whole_prompts(family: str, backend: str) -> None:
    bench = harness(family, backend)
    worst = 0.0
    for tokens in prompts():
        stream = bench.stream(tokens)
        bench.step([(stream, len(tokens))])
        worst = max(worst, error(family, stream))
    print(f"{family} on {backend}: largest relative error of whole prompts {worst:.1e}")
    assert worst < TOLERANCE
    assert expected(family, prompts()[-1]).std() >= 1


@pytest.mark.parametrize("family", FAMILIES)
@backends
def test_logits_of_mixed_batches(family: str, backend: str) -> None:
    """20 requests at once: chunks of 1 to 100 tokens, prefill beside decode, pages in any order."""
    bench = harness(family, backend, seed=1)
    streams = [bench.stream(tokens) for tokens in prompts()]
    bench.run(streams, budget=300)
    worst = max(error(family, stream) for stream in streams)
    print(f"{family} on {backend}: largest relative error of mixed batches {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@backends
def test_resume_from_exported_states(family: str, backend: str) -> None:
    """States exported inside a pass, and at its end, are those after exactly that many tokens."""
    bench = harness(family, backend, seed=2)
    other, stream = bench.stream(prompts()[10]), bench.stream(prompts()[-3])
    bench.step([(stream, 40)])
    wanted = (1, 2, 3, 24, 60, 100)
    states = [bench.new_state() for _ in wanted]
    exports = [(1, tokens, state) for tokens, state in zip(wanted, states, strict=True)]
    bench.step([(other, 30), (stream, 100)], exports)
    for tokens, state in zip(wanted, states, strict=True):
        resumed = bench.resume(stream, state, 40 + tokens)
        bench.step([(resumed, 50)])
        assert error(family, resumed, first=40 + tokens) < TOLERANCE
    bench.step([(stream, 1)])
    assert error(family, stream) < TOLERANCE, "an export must not disturb the running state"


@pytest.mark.parametrize("family", FAMILIES)
@backends
def test_greedy_answers(family: str, backend: str) -> None:
    """Teacher-forced: the oracle's next token is ours wherever its two best differ by more than 1e-4."""
    prompt = prompts()[6]
    answer = oracle_greedy(checkpoint(family), prompt, 64)
    assert len(set(answer)) >= 20, "the checkpoint answers too evenly to test anything"
    bench = harness(family, backend)
    stream = bench.stream((*prompt, *answer))
    bench.step([(stream, len(prompt))])
    while stream.left:
        bench.step([(stream, 1)])
    ours = torch.cat(stream.logits)[len(prompt) - 1 : -1]
    best = expected(family, tuple(stream.tokens))[len(prompt) - 1 : -1].topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-4
    assert clear.sum() > 60
    assert torch.equal(ours.argmax(-1)[clear], torch.tensor(answer)[clear])


@backends
def test_only_wanted_rows_give_logits(backend: str) -> None:
    from steps import make_batch

    bench = harness("qwen3_5", backend)
    tokens = prompts()[8]
    batch = make_batch([(tokens, 0, [7], 1)], logit_rows=[2, len(tokens) - 1])
    logits = bench.model.forward(batch, bench.views)
    truth = expected("qwen3_5", tokens)[[2, len(tokens) - 1]]
    assert logits.shape == truth.shape
    assert logits.dtype == torch.float32
    assert (logits - truth).abs().max() / truth.abs().max() < TOLERANCE
    nothing = make_batch([(tokens, 0, [7], 1)], logit_rows=[])
    assert bench.model.forward(nothing, bench.views).shape == (0, VOCAB)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near(family: str, dtype: torch.dtype) -> None:
    """Half-width weights, activations and pages: close to float32, as far as their rounding allows."""
    folder = checkpoint(family)
    config = config_from_folder(folder)
    layout, source = config.cache_layout(16, dtype=dtype), SafetensorsSource(folder)
    model = load_model(
        config, source, dtype=dtype, device="cpu", backend=get_backend("reference"), layout=layout
    )
    bench = Harness(model, layout)
    stream = bench.stream(prompts()[12])
    bench.step([(stream, 20)])
    bench.step([(stream, stream.left)])
    truth = expected(family, tuple(stream.tokens))
    similarity = torch.nn.functional.cosine_similarity(torch.cat(stream.logits), truth, dim=-1)
    assert similarity.median() > (0.99 if dtype == torch.bfloat16 else 0.999)
