"""SmolLM2-135M's real weights against transformers in float32: logits, and the engine's greedy answers."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from offline import make_core, run
from steps import Harness

from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine import resolve as resolve_module
from plait.engine.resolve import load_worker, resolve
from plait.kernels.registry import get_backend
from plait.models.hub import pull
from plait.text.tokenizer import Tokenizer

LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 129, 200, 257, 333, 700)
TOKENS = 64
OPENINGS = (
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "The three laws of motion say that",
    "def quicksort(items):\n    ",
    "A recipe for vegetable soup:\n\n1.",
    "<|im_start|>user\nWrite a short story about a fox and a lighthouse.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(autouse=True)
def _reference_kernels(monkeypatch):
    """The file's 4-bit weights as numbers: other kernels multiply them with rounded activations."""
    monkeypatch.setattr(resolve_module, "get_backend", lambda name, device: get_backend("reference", device))


@functools.cache
def oracle():
    """transformers' model of the same file. It asks for accelerate, and then does not use it."""
    import transformers

    path = pull("smollm2-135m")
    asked = transformers.modeling_utils.is_accelerate_available
    transformers.modeling_utils.is_accelerate_available = lambda *_: True
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
    finally:
        transformers.modeling_utils.is_accelerate_available = asked
    return model.eval()


@functools.cache
def text_tokens() -> list[int]:
    """A long real text: this project's own description."""
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    return Tokenizer.load(pull("smollm2-135m")).encode(text)


@torch.inference_mode()
def test_logits_of_twenty_prompts():
    resolved = resolve(EngineArgs(model="smollm2-135m"))
    worker = load_worker(resolved)
    tokens, worst = text_tokens(), 0.0
    for i, length in enumerate(LENGTHS):
        bench = Harness(worker.model, worker.model.layout)
        prompt = tokens[17 * i : 17 * i + length]
        stream = bench.stream(tuple(prompt))
        bench.step([(stream, length)])
        ours = torch.cat(stream.logits)
        truth = oracle()(torch.tensor([prompt])).logits[0]
        worst = max(worst, ((ours - truth).abs().max() / truth.abs().max()).item())
    print(f"largest relative error {worst:.1e}")
    assert worst < 1e-4


@pytest.mark.parametrize("budget", [64, 2048])
@torch.inference_mode()
def test_greedy_answers(budget):
    """Together, at a small and a large budget; then again, from the prefix cache."""
    tokenizer = Tokenizer.load(pull("smollm2-135m"))
    prompts = [tokenizer.encode_chat(opening) for opening in OPENINGS] + [text_tokens()[:300]]
    core = make_core(Path(pull("smollm2-135m")), max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for again in (False, True):
        answers = run(core, prompts, params)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(set(answer.tokens)) >= 20
            assert (answer.num_cached_tokens > 0) == (again and len(prompt) > 16)
            assert_greedy(prompt, answer.tokens)


def assert_greedy(prompt, answer):
    """Each token is the oracle's best after those before it, or within 1e-4 of it. One pass over all."""
    logits = oracle()(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    assert (logits.max(-1).values - chosen).max().item() < 1e-4


def test_packed_weights_cost_little(monkeypatch):
    """Perplexity of a real text with the file's weights kept packed, against the same weights as numbers."""
    wanted = perplexity()
    monkeypatch.undo()
    packed = perplexity()
    print(f"perplexity {packed:.3f} packed, {wanted:.3f} in float32")
    assert packed < 1.02 * wanted


def perplexity() -> float:
    core = make_core(Path(pull("smollm2-135m")))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    core.add("text", text_tokens()[:700], params, seed=0, max_tokens=1)
    entries = []
    while core.has_work:
        for progress in core.step().progress:
            entries += progress.prompt_logprobs or ()
    return math.exp(-sum(entry[0][1] for entry in entries) / len(entries))
