"""Chat templates: from messages to the text that the model was trained to see.

Templates are Jinja programs that come with the weights, so they run in a sandbox. The names they may use
(``raise_exception``, ``strftime_now``, ``tojson`` with keywords, ``{% generation %}``) are those of
``transformers.PreTrainedTokenizer.apply_chat_template``, for which templates are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.text.messages import (
    ChatError,
    Message,
    normalize,
    with_content_parts,
    with_joined_content,
    with_json_arguments,
)
from plait.text.tokenizer import Tokenizer

__all__ = ["ChatError", "ChatTemplate"]

_MARK = "Zq7mark"


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it only encloses text."""

    tags = {"generation"}  # noqa: RUF012 - the library's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The chat template of one model.

    Args:
        source: Jinja source, or several by name: "default", and "tool_use" for requests with tools.
        special_tokens: names that templates read, such as ``bos_token``, to the tokens' text.

    Raises:
        ChatError: the source is no valid template.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self.source = "\n".join(sources.values())
        """all of its text, to see what it speaks of"""
        self._special_tokens = dict(special_tokens or {})
        self._templates = {name: _compile(name, text) for name, text in sources.items()}
        if not self._templates:
            raise ChatError("this model has no chat template; give one (a Jinja file), or send a raw prompt")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that came with a tokenizer. Raises ChatError if it has none."""
        return cls(tokenizer.chat_templates, tokenizer.special_tokens_map)

    def render(
        self,
        /,  # a template may have a variable of any name
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The text of a conversation, in which special tokens are written out.

        Args:
            messages: in OpenAI's form. Left as they are; the template sees a normalised copy.
            tools: OpenAI's ``tools``; the template is given them unchanged.
            add_generation_prompt: end with the opening of an answer.
            continue_final_message: end right after the last message's text, for the model to go on with it.
            template_kwargs: names for the template, such as ``enable_thinking``.

        Raises:
            ChatError: messages that cannot be read, or that the template refuses.
        """
        if not messages:
            raise ChatError("messages is empty; send at least one message")
        if continue_final_message and add_generation_prompt:
            raise ChatError("continue_final_message excludes add_generation_prompt; set one of them")
        chat = normalize(messages)
        chat = self._fit_content(chat)
        if self._takes_json_arguments:
            chat = with_json_arguments(chat)
        values = {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        values |= template_kwargs
        if continue_final_message:
            return self._render_open(chat, values)
        return self._render(chat, values)

    def _render(self, chat: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        name = "tool_use" if values.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render({**self._special_tokens, "documents": None, **values, "messages": chat})
        except jinja2.TemplateError as fault:
            raise ChatError(f"the chat template refused these messages: {fault.message or fault}") from fault
        except Exception as fault:  # a template can fail with any Python error
            raise ChatError(
                f"the chat template failed on these messages ({type(fault).__name__}: {fault}); "
                "it may not know a role, a field or a form of content among them"
            ) from fault

    def _render_open(self, chat: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        """Render up to the end of the last message's text: a mark is put there, and all cut from it on."""
        last = dict(chat[-1])
        content = last.get("content")
        if isinstance(content, list) and content and "text" in content[-1]:
            last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK + " "}]
        elif isinstance(content, str):
            last["content"] = content + _MARK + " "
        else:
            raise ChatError("continue_final_message is set, but the last message has no text to continue")
        rendered = self._render([*chat[:-1], last], values)
        cut = rendered.rfind(_MARK)
        if cut < 0:
            raise ChatError(
                "continue_final_message is set, but the chat template does not show the last message's text"
            )
        if rendered.startswith(_MARK + " ", cut):
            return rendered[:cut]
        # The template trims messages, so the text's own end would have been trimmed too.
        return rendered[:cut].rstrip()

    def _probe(self, chat: list[dict[str, Any]]) -> str | None:
        """Render a trial conversation; None if the template refuses it."""
        try:
            return self._render(chat, {"tools": None, "add_generation_prompt": False})
        except ChatError:
            return None

    def _fit_content(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Content in a form that the template reads: strings, lists of parts, or either as it came."""
        if not self._reads_parts:
            return with_joined_content(chat)
        return chat if self._reads_strings else with_content_parts(chat)

    @cached_property
    def _reads_strings(self) -> bool:
        """The template shows a message whose content is a string."""
        return _MARK in (self._probe([{"role": "user", "content": _MARK}]) or "")

    @cached_property
    def _reads_parts(self) -> bool:
        """The template shows the text of a message whose content is a list, and not the list itself."""
        part = {"type": "text", "text": _MARK}
        shown = self._probe([{"role": "user", "content": [part]}]) or ""
        return _MARK in shown and "'type'" not in shown and '"type"' not in shown

    @cached_property
    def _takes_json_arguments(self) -> bool:
        """The template concatenates a tool call's arguments as text rather than reading them as an object."""
        chat = self._fit_content(_tool_call_trial())
        as_object = self._probe(chat)
        if as_object is not None:
            return f"'{_MARK}':" in as_object  # the way Python prints a dict
        return self._probe(with_json_arguments(chat)) is not None


def _tool_call_trial() -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {_MARK: "x"}}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "x"},
    ]


def _compile(name: str, source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as fault:
        raise ChatError(
            f"the chat template {name!r} is no valid Jinja: {fault.message} (line {fault.lineno}); "
            "correct it, or give another one"
        ) from fault
