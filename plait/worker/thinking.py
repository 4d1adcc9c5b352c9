"""A bound on the tokens of reasoning in one answer.

Once the reasoning is as long as it may be, the next tokens are those that end it, whatever the model would
say. The rule looks at the answer's tokens alone, so it does not depend on how they were scheduled, and an
answer that resumes after a preemption finds itself where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.core.sampling_params import ThinkingBudget


class ThinkingState:
    """Follows one answer token by token.

    Args:
        budget: what was asked.
        answer: tokens that were generated already.
    """

    def __init__(self, budget: ThinkingBudget, answer: Iterable[int] = ()) -> None:
        self._budget = budget
        self._inside = not budget.opens
        self._over = False
        self._count = 0
        """tokens of reasoning so far"""
        self._forced = 0
        """tokens of ``closes`` that have come"""
        longest = max(map(len, (budget.opens, *budget.ends)), default=0)
        self._recent: list[int] = []
        self._longest = longest
        for token in answer:
            self.append(token)

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        room = self._budget.tokens - len(self._budget.closes) + self._budget.tag_tokens
        if self._inside and not self._over and (self._forced or self._count >= max(room, 0)):
            return self._budget.closes[self._forced]
        return None

    def append(self, token: int) -> None:
        """One more token of the answer."""
        if self._over:
            return
        forced = self.forced is not None
        self._recent = [*self._recent, token][-self._longest :] if self._longest else []
        if not self._inside:
            self._inside = self._ends_in(self._budget.opens)
            return
        self._count += 1
        self._forced += forced
        self._over = self._forced == len(self._budget.closes) or any(map(self._ends_in, self._budget.ends))

    def _ends_in(self, tokens: Sequence[int]) -> bool:
        return len(tokens) > 0 and self._recent[-len(tokens) :] == list(tokens)
