"""Asks all questions, some at a time, and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.eval.question import Question, Said
from plait.eval.statistics import wilson
from plait.eval.targets import Asking, Target


@dataclass(frozen=True, slots=True)
class Answered:
    question: Question
    said: Said

    @property
    def right(self) -> bool:
        return self.said.error is None and self.question.right(self.said)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.question.id, "kind": self.question.kind, "wanted": self.question.wanted,
            "said": self.said.shown, "right": self.right, "error": self.said.error,
            "finish_reason": self.said.finish_reason, "output_tokens": self.said.output_tokens,
            "prompt_tokens": self.said.prompt_tokens, "cached_tokens": self.said.cached_tokens,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the table."""

    kind: str
    count: int
    right: int
    errors: int

    @property
    def accuracy(self) -> float:
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95%, Wilson's."""
        return wilson(self.right, self.count)

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "kind": self.kind, "count": self.count, "right": self.right, "errors": self.errors,
            "accuracy": self.accuracy, "low": low, "high": high,
        }  # fmt: skip


async def ask_all(
    target: Target,
    questions: Sequence[Question],
    asking: Asking,
    concurrency: int,
    on_answer: Callable[[Answered], None] | None = None,
) -> list[Answered]:
    """Answers in the order of the questions.

    Args:
        concurrency: questions that are asked at a time.
        on_answer: called with each as it comes.

    Raises:
        EngineDeadError: the engine of an ``EngineTarget`` has ended.
    """
    answers: dict[int, Answered] = {}
    waiting = iter(enumerate(questions))

    async def worker() -> None:
        for index, question in waiting:
            said = await target.ask(question, asking, asking.seed + index)
            answers[index] = Answered(question, said)
            if on_answer is not None:
                on_answer(answers[index])

    workers = [asyncio.ensure_future(worker()) for _ in range(min(concurrency, len(questions)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[index] for index in range(len(questions))]


def scores(answers: Sequence[Answered]) -> list[Score]:
    """By kind, in the order in which kinds first occur; a question without an answer is a wrong one."""
    kinds = dict.fromkeys(answer.question.kind for answer in answers)
    found = []
    for kind in kinds:
        mine = [answer for answer in answers if answer.question.kind == kind]
        errors = sum(answer.said.error is not None for answer in mine)
        found.append(Score(kind, len(mine), sum(answer.right for answer in mine), errors))
    return found
