"""What traffic the user asks for: the flags that all commands share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

PROFILES = ("random", "mix", "conversation", "shared-prefix")


def _flag(default: Any, help: str) -> Any:
    """A field that carries its own help text: the command line reads it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class TrafficArgs:
    """Traffic settings; names as in vLLM's benchmark where it has them. Lengths are in tokens."""

    profile: str = _flag("random", f"What sessions look like: {', '.join(PROFILES)}.")
    num_prompts: int = _flag(32, "Sessions: prompts, or whole conversations.")
    random_input_len: int = _flag(
        512, "Tokens of a prompt (of each turn, of the tail behind a shared prefix)."
    )
    random_output_len: int = _flag(64, "Tokens of an answer.")
    random_range_ratio: float = _flag(0.0, "Lengths vary uniformly by this part of themselves, below 1.")
    long_share: float = _flag(0.3, "mix: part of the prompts that is long.")
    long_input_len: int = _flag(4096, "mix: tokens of a long prompt.")
    short_input_len: int = _flag(128, "mix: tokens of a short prompt.")
    turns: int = _flag(8, "conversation: turns, each re-sending the history.")
    prefix_len: int = _flag(1024, "shared-prefix, conversation: tokens of the system prompt.")
    num_prefixes: int = _flag(1, "shared-prefix: different system prompts.")
    max_concurrency: int | None = _flag(
        None, "Sessions at a time: a closed loop, or a cap on --request-rate."
    )
    request_rate: float | None = _flag(None, "Sessions per second, Poisson arrivals; inf: all at once.")
    num_warmups: int = _flag(2, "Requests sent before measuring.")
    traffic_seed: int | None = _flag(
        None, "Fixes prompts and arrivals; random by default, so that no cache knows them."
    )

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(f"--profile {self.profile!r}: choose one of {', '.join(PROFILES)}")
        if self.num_prompts < 1 or self.num_warmups < 0:
            raise ValueError("--num-prompts must be from 1 up, and --num-warmups from 0 up")

    def settled(self) -> TrafficArgs:
        """With a seed and a way to arrive: by default a closed loop of one."""
        seed = self.traffic_seed if self.traffic_seed is not None else secrets.randbelow(2**31)
        lone = self.max_concurrency is None and self.request_rate is None
        return replace(self, traffic_seed=seed, max_concurrency=1 if lone else self.max_concurrency)


@dataclass(frozen=True, slots=True)
class OutputArgs:
    """Where results go, besides the terminal."""

    output: str | None = _flag(None, "File for the whole result as JSON.")
    html: str | None = _flag(None, "File for a report with plots (needs plait[bench]).")


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """How an OpenAI-compatible server is asked."""

    endpoint: str = _flag("completions", "completions or chat.")
    prompts: str = _flag("text", "text or tokens (ids; completions only).")
    model: str | None = _flag(None, "Model as the server calls it; by default the first it lists.")
    tokenizer: str | None = _flag(
        None, "Model or folder whose tokenizer sizes text prompts; else one word counts as one token."
    )
    vocab_size: int | None = _flag(None, "Token ids lie below it, where no tokenizer is given.")
    api_key: str | None = _flag(None, "Key sent to the server.")
    timeout: float = _flag(600.0, "Seconds without a byte after which a request has failed.")
    extra_body: str = _flag("{}", "JSON object of further fields for every request.")
