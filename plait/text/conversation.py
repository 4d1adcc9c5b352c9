"""A conversation as a prompt: rendered, tokenised, and with the positions that the prefix cache wants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.text.boundaries import Boundaries, boundaries_of, message_starts
from plait.text.chat import ChatTemplate
from plait.text.messages import Message
from plait.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Conversation:
    """``text`` has its special tokens written out."""

    text: str
    tokens: list[int]
    boundaries: Boundaries

    def prompt(self) -> dict[str, Any]:
        """The form in which an engine takes it."""
        return {"prompt": self.text, "prompt_token_ids": self.tokens, "boundaries": self.boundaries}


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    /,  # a template may have a variable of any name
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    ending: Callable[[str], str] | None = None,
    **template_kwargs: Any,
) -> Conversation:
    """Render and tokenise ``messages``; see ``ChatTemplate.render`` for the arguments.

    ``ending`` is given the rendering, and returns what the prompt has behind it.

    Raises:
        ChatError: messages that cannot be read, or that the template refuses.
    """
    text = template.render(messages, tools, add_generation_prompt, continue_final_message, **template_kwargs)
    if ending is not None:
        text += ending(text)
    tokens = tokenizer.encode_chat(text)
    boundaries = Boundaries()
    for groups in _groupings(messages):
        count = groups[-1] + 1
        starts = message_starts(tokens, tokenizer.special_ids, count, add_generation_prompt)
        if starts:
            boundaries = boundaries_of(
                starts,
                count,
                add_generation_prompt,
                has_system=bool(tools) or messages[0].get("role") in ("system", "developer"),
                marked_messages=[groups[i] for i, message in enumerate(messages) if _is_marked(message)],
            )
            break
    return Conversation(text, tokens, boundaries)


def _groupings(messages: Sequence[Message]) -> Iterator[list[int]]:
    """For each message, which of the rendered ones it becomes: one of its own, or, as some templates do it,
    the results of a round of tool calls together in one."""
    roles = [message.get("role") for message in messages]
    yield list(range(len(messages)))
    together = [not (i and role == "tool" and roles[i - 1] == "tool") for i, role in enumerate(roles)]
    if not all(together):
        yield [number - 1 for number in itertools.accumulate(together)]


def _is_marked(message: Message) -> bool:
    """Whether the client put ``cache_control`` on the message or on a part of its content."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and bool(part.get("cache_control")) for part in (message, *parts))
