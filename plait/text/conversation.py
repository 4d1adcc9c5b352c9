"""A conversation as a prompt: rendered, tokenised, and with the positions that the prefix cache wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    **template_kwargs: Any,
) -> Conversation:
    """Render and tokenise ``messages``; see ``ChatTemplate.render`` for the arguments.

    Raises:
        ChatError: messages that cannot be read, or that the template refuses.
    """
    text = template.render(messages, tools, add_generation_prompt, continue_final_message, **template_kwargs)
    tokens = tokenizer.encode_chat(text)
    count = len(messages)
    starts = message_starts(tokens, tokenizer.special_ids, count, add_generation_prompt)
    boundaries = boundaries_of(
        starts,
        count,
        add_generation_prompt,
        has_system=bool(tools) or messages[0].get("role") in ("system", "developer"),
        marked_messages=[i for i, message in enumerate(messages) if _is_marked(message)],
    )
    return Conversation(text, tokens, boundaries)


def _is_marked(message: Message) -> bool:
    """Whether the client put ``cache_control`` on the message or on a part of its content."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and bool(part.get("cache_control")) for part in (message, *parts))
