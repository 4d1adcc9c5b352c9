"""Where the messages of a rendered conversation begin, as token positions.

The prefix cache wants to know: the next turn repeats everything up to the end of the last message, and not
the generation prompt behind it; other conversations repeat the system prompt and the tools. Positions come
from special tokens in the whole rendering; pieces are never tokenised by themselves, since a piece may
tokenise differently than it does in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Positions in a prompt, in tokens from its start.

    Args:
        tail: the end of the last message, where the generation prompt begins; None: the prompt's end.
        marked: ends of other parts that are likely to be shared, ascending.
    """

    tail: int | None = None
    marked: tuple[int, ...] = ()


def message_starts(
    tokens: Sequence[int], special_ids: Collection[int], num_messages: int, generation_prompt: bool
) -> list[int]:
    """Positions at which messages begin, the generation prompt last. Empty where that cannot be told.

    A message's opening token is a special token that occurs once for each message and for the generation
    prompt, and perhaps once more (some templates put a system message of their own before the first). Where
    several tokens do, the one that comes first in the text opens messages; a token at the very beginning that
    is not repeated does not.

    Args:
        tokens: the whole rendering.
        special_ids: the tokenizer's special tokens.
        num_messages: messages that were rendered.
        generation_prompt: whether the rendering ends with the opening of an answer.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for position, token in enumerate(tokens):
        if token in special_ids:
            places[token].append(position)
    openings = num_messages + generation_prompt
    fitting = [
        found for found in places.values() if len(found) in (openings, openings + 1) and len(found) > 1
    ]
    return min(fitting, key=lambda found: found[0]) if fitting else []


def boundaries_of(
    starts: Sequence[int],
    num_messages: int,
    generation_prompt: bool,
    *,
    has_system: bool,
    marked_messages: Collection[int] = (),
) -> Boundaries:
    """What to mark in a conversation.

    Marked are the end of the system prompt (with the tools that templates render into it), the start of the
    last message, and the ends of messages that the client marks.

    Args:
        starts: of ``message_starts``.
        num_messages: messages that were rendered.
        generation_prompt: whether the last start is the generation prompt's.
        has_system: the first message is a system message, or tools were given.
        marked_messages: indices of messages whose end the client marks.
    """
    if not starts:
        return Boundaries()
    tail = starts[-1] if generation_prompt else None
    own = starts[:-1] if generation_prompt else list(starts)
    added = len(own) - num_messages  # 1 where the template put a system message before the first
    ends = [*starts[1:], None] if not generation_prompt else list(starts[1:])
    marked = set()
    if (has_system or added) and ends and ends[0] is not None:
        marked.add(ends[0])
    if own:
        marked.add(own[-1])
    for index in marked_messages:
        end = ends[index + added] if 0 <= index + added < len(ends) else None
        if end is not None:
            marked.add(end)
    marked -= {0, tail}
    return Boundaries(tail, tuple(sorted(p for p in marked if p)))
