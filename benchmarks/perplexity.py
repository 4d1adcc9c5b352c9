"""What narrower formats cost: perplexity of a text under each, against bfloat16 weights.

    python benchmarks/perplexity.py                 # SmolLM2-135M on docs/design.md

Weights are those of the model's GGUF file as numbers, so that ``int4`` rounds numbers and not the file's own
blocks; ``the file's Q4_1`` keeps those. They were rounded before: what rounding costs where they were not is
seen on a model with the same answers and other groups (``shuffled.py``). A recurrent state in bfloat16 is
measured on a hybrid with random weights, where perplexity says nothing: by how far log-probabilities of a
text move. Needs transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from models import hybrid, safetensors_of
from safetensors.torch import load_file, save_file
from shuffled import shuffled

from plait import LLM, SamplingParams
from plait.models.hub import pull

VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "bfloat16": ("bf16", {}),
    "float32": ("f32", {}),
    "int8": ("f32", {"quantization": "int8"}),
    "int4": ("f32", {"quantization": "int4"}),
    "shuffled, float32": ("shuffled", {}),
    "shuffled, int8": ("shuffled", {"quantization": "int8"}),
    "shuffled, int4": ("shuffled", {"quantization": "int4"}),
    "the file's Q4_1": ("gguf", {}),
    "bfloat16, KV in bfloat16": ("bf16", {"kv_cache_dtype": "bfloat16"}),
    "bfloat16, KV in fp8": ("bf16", {"kv_cache_dtype": "fp8"}),
    "bfloat16, KV in int8": ("bf16", {"kv_cache_dtype": "int8"}),
}
"""Name -> (form of the weights, engine settings)"""


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural logarithms of the probability of each token of a text after the first."""

    values: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.values) / len(self.values))

    def distance(self, other: Scores) -> float:
        """Mean absolute difference, in nats."""
        return sum(abs(a - b) for a, b in zip(self.values, other.values, strict=True)) / len(self.values)


def score(model: Path, settings: dict[str, str], text: str, tokens: int) -> Scores:
    """Score up to ``tokens`` tokens of ``text``, in windows of 1,024 that are scored alone."""
    values: list[float] = []
    with LLM(str(model), max_model_len=1032, enable_prefix_caching=False, **settings) as llm:
        ids = llm.get_tokenizer().encode(text)[:tokens]
        windows = [ids[i : i + 1024] for i in range(0, len(ids), 1024)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        for answer in llm.generate([{"prompt_token_ids": w} for w in windows if len(w) > 1], params):
            for token, entry in zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True):
                if entry is not None:
                    values.append(entry[token].logprob)
    return Scores(values)


def in_bfloat16(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint with its weights in bfloat16."""
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in folder.glob("*.json"):
        text = file.read_text().replace('"torch_dtype": "float32"', '"torch_dtype": "bfloat16"')
        (target / file.name).write_text(text)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs" / "design.md")
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=VARIANTS, help="of these; the first is the base"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "plait-peers")
    given = parser.parse_args()
    text, files = given.text.read_text(encoding="utf-8"), given.cache / "models"
    files.mkdir(parents=True, exist_ok=True)
    gguf = Path(pull("smollm2-135m"))
    numbers = safetensors_of(gguf, files / "smollm2-135m")
    forms = {
        "gguf": gguf,
        "f32": numbers,
        "bf16": in_bfloat16(numbers, files / "smollm2-135m-bf16"),
        "shuffled": shuffled(numbers, files / "smollm2-135m-shuffled"),
    }

    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    print(f"SmolLM2-135M, {given.text.name} ({digest}), {given.tokens:,} tokens at most\n")
    print("| | perplexity | against bfloat16 |\n|---|---|---|")
    base = 0.0
    for name, (form, settings) in VARIANTS.items():
        if given.only and name not in given.only:
            continue
        found = score(forms[form], settings, text, given.tokens).perplexity
        base = base or found
        print(f"| {name} | {found:.3f} | {found / base - 1:+.2%} |", flush=True)

    if given.only:
        return
    small = hybrid(
        files / "hybrid-small", numbers, num_hidden_layers=8, hidden_size=256, intermediate_size=640
    )
    plain, narrow = (
        score(small, {"mamba_ssm_cache_dtype": kind}, text, given.tokens) for kind in ("float32", "bfloat16")
    )
    print(f"\nstate in bfloat16, random hybrid: log-probabilities move by {plain.distance(narrow):.2g} nats")


if __name__ == "__main__":
    main()
