"""How much of a prompt a step computes."""

from __future__ import annotations

from plait.core.draft import Draft
from plait.core.limits import SchedulerConfig
from plait.core.pace import Pace
from plait.core.request import Request

SCORED_TOKENS = 256
"""Most tokens in one step of a prompt whose log-probabilities are asked for: each makes a row of logits."""


class Chunks:
    """Cuts prompts: by the budget, by caps, by the pace of running answers; ends chunks on the grid."""

    def __init__(self, config: SchedulerConfig, grid: int, pace: Pace) -> None:
        self.config = config
        self.grid = grid
        self.pace = pace

    def count(self, draft: Draft, request: Request, start: int) -> int:
        """Tokens of a prompt (or of a resumed answer) to compute from ``start`` in this step; 0: none fit."""
        behind = request.goal - start
        if not self.config.chunked_prefill:
            return behind if behind <= draft.left else 0
        count = min(behind, draft.left)
        caps = [self.config.long_prefill_token_threshold, 0 if request.reads_cache else SCORED_TOKENS]
        for cap in filter(None, caps):
            count = min(count, max(cap, self.grid))
        if draft.turn:  # answers are waiting for this step to end
            least = 0 if draft.prompt_tokens else self.grid
            if beside := self.config.prompt_tokens_beside_answers:
                count = min(count, max(beside - draft.prompt_tokens, least))
            count = min(count, max(self.pace.chunk(draft.tokens, draft.pairs, start, count), least))
        if count < behind:  # it does not reach the end: end on the grid
            count = max(0, (start + count) // self.grid * self.grid - start)
        return count
