"""What quantised weights cost a real model: perplexity of a text, against the weights of its file."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from plait import LLM, SamplingParams
from plait.kernels.cpu.native import MISSING, native

if native is None:
    pytest.skip(f"no CPU kernels: {MISSING}", allow_module_level=True)

TEXT = Path(__file__).parent.parent / "docs" / "design.md"
WINDOW, WINDOWS = 1024, 2


@functools.cache
def perplexity(quantisation: str | None) -> float:
    """Of SmolLM2-135M on the first tokens of a text, in windows that are scored alone."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(
        "smollm2-135m", max_model_len=WINDOW + 8, enable_prefix_caching=False, quantization=quantisation
    ) as llm:
        ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
        prompts = [{"prompt_token_ids": ids[i * WINDOW : (i + 1) * WINDOW]} for i in range(WINDOWS)]
        found = [
            entry[token].logprob
            for answer in llm.generate(prompts, params)
            for token, entry in zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
            if entry is not None
        ]
    assert len(found) == WINDOWS * (WINDOW - 1)
    return math.exp(-sum(found) / len(found))


@pytest.mark.slow
@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_quantised_weights_cost_little(quantisation):
    # int4 finds the blocks of 4 bits again that the file's numbers were rounded to.
    ours, base = perplexity(quantisation), perplexity(None)
    print(f"{quantisation}: perplexity {ours:.2f}, {ours / base - 1:+.2%}")
    assert ours < 1.005 * base
