"""What bounds a step and a request, and what can never be served."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.geometry import Geometry
from plait.core.request import Request


class Refused(ValueError):
    """The request can never be served; the message has the arithmetic."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What bounds a step.

    Args:
        max_num_batched_tokens: token budget of a step; at least one grid unit.
        max_num_seqs: most requests that run at once.
        max_model_len: most tokens of prompt and answer.
        long_prefill_token_threshold: most tokens of one prompt in a step; 0: no cap.
        prompt_tokens_beside_answers: most tokens of prompts in a step that running answers wait for; 0: no
            cap. At least one grid unit is computed, so that prompts go on.
        chunked_prefill: False runs each prompt in one step.
        priorities: order by (priority, arrival) instead of arrival alone; a lower number goes first.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    prompt_tokens_beside_answers: int = 0
    chunked_prefill: bool = True
    priorities: bool = False

    @property
    def whole_prompt_budget(self) -> int:
        """Token budget that the longest prompt fits into beside all other answers."""
        return self.max_model_len + self.max_num_seqs

    def check(self, grid: int) -> None:
        """Raises ValueError: a step is too small for chunks that end at multiples of ``grid`` tokens."""
        if self.max_num_batched_tokens < grid:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: chunks end at multiples of "
                f"{grid} on this backend; set it to {grid} or more"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.whole_prompt_budget:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: without chunked prefill a step "
                "must hold a whole prompt beside the answers; set it to "
                f"{self.whole_prompt_budget} or more"
            )


def refuse_if_hopeless(request: Request, config: SchedulerConfig, geometry: Geometry) -> None:
    """Raises Refused: the request could not be served if it were alone."""
    prompt, longest = request.num_prompt_tokens, config.max_model_len
    if prompt < 1:
        raise Refused("the prompt is empty; send at least one token")
    if prompt + request.max_tokens > longest:
        raise Refused(
            f"{prompt} prompt tokens and max_tokens={request.max_tokens} make "
            f"{prompt + request.max_tokens}, above max_model_len={longest}; shorten one of them"
        )
    needed = geometry.slabs_for(prompt + request.max_tokens)
    if needed > geometry.num_slabs:
        raise Refused(
            f"{prompt + request.max_tokens} tokens need {needed * geometry.slab_bytes:,} bytes of cache, "
            f"the arena has {geometry.num_slabs * geometry.slab_bytes:,}; raise memory_limit"
        )
