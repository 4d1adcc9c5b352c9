"""Questions and answers from a JSONL file, in the format of GSM8K.

Each line is ``{"question": ..., "answer": ...}``. An answer that ends in ``#### 42`` is the number 42; of
what the model says, the number behind its own ``####`` counts, else the last number. Any other answer is
compared as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

from plait.eval.question import Question, Said

_MARKED = re.compile(r"####\s*([-+]?\s?\$?[-+]?[\d.,]+)")
_NUMBER = re.compile(r"[-+]?\$?\d(?:[\d,]*\d)?(?:\.\d+)?|[-+]?\$?\.\d+")


def read(path: Path, most: int | None = None) -> list[Question]:
    """The questions of a file; the kind is the file's name.

    Args:
        path: the file.
        most: of the first so many lines; None: all.

    Raises:
        ValueError: a line that is not of this form, or no line.
        OSError: the file cannot be read.
    """
    made: list[Question] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if most is not None and len(made) == most:
                break
            if line.strip():
                made.append(_question(path, number, line))
    if not made:
        raise ValueError(f"{path} holds no questions; each line must be a question and its answer as JSON")
    return made


def _question(path: Path, number: int, line: str) -> Question:
    form = '{"question": text, "answer": text}'
    try:
        entry = json.loads(line)
        question, answer = entry["question"], entry["answer"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}, line {number}: each line must be {form}") from None
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError(f"{path}, line {number}: question and answer must be text, as in {form}")
    right, wanted = _judge(path, number, answer)
    return Question(
        f"{path.stem}/{number}", path.stem, [{"role": "user", "content": question}], wanted, right
    )


def _judge(path: Path, number: int, answer: str) -> tuple[Callable[[Said], bool], str]:
    """What is right, and how it is shown."""
    if "####" not in answer:
        return (lambda said: said.content.strip() == answer.strip()), answer.strip()
    value = marked_number(answer)
    if value is None:
        raise ValueError(f"{path}, line {number}: behind #### there must be a number")
    return (lambda said: number_of(said.content) == value), str(value)


def marked_number(text: str) -> Decimal | None:
    """The number behind the last ``####``, or None."""
    found = _MARKED.findall(text)
    return _decimal(found[-1]) if found else None


def number_of(text: str) -> Decimal | None:
    """The number that an answer gives: the marked one, else the last; None where there is none."""
    marked = marked_number(text)
    if marked is not None:
        return marked
    found = _NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[$,\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None
