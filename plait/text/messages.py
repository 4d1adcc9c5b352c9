"""OpenAI's chat messages, brought into the one form that chat templates are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class ChatError(ValueError):
    """Messages that cannot be rendered; the message says which one and why."""


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of ``messages`` with content as strings or text parts, and tool-call arguments as objects.

    Keys whose value is None are left out (templates test for absence, and print "None" otherwise), and
    reasoning is found under ``reasoning_content`` whatever the client called it. Roles are left to the
    template.
    """
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f"messages[{index}] must be an object with a role, not {_kind(message)}")
        if not isinstance(message.get("role"), str):
            raise ChatError(f'messages[{index}] needs a role, such as "user"')
        plain = {key: value for key, value in message.items() if value is not None}
        if "content" in plain:
            plain["content"] = _text_content(plain["content"], index)
        if "tool_calls" in plain:
            plain["tool_calls"] = [
                _tool_call(call, f"messages[{index}].tool_calls[{i}]")
                for i, call in enumerate(_list(plain["tool_calls"], f"messages[{index}].tool_calls"))
            ]
        reasoning = plain.get("reasoning_content", plain.get("reasoning"))
        if isinstance(reasoning, str):
            plain["reasoning_content"] = reasoning
        chat.append(plain)
    return chat


def with_joined_content(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of ``chat`` with each list of text parts as one string, the texts on lines of their own."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in chat
    ]


def with_content_parts(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of ``chat`` with each string of content as a list of one text part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in chat
    ]


def with_json_arguments(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of ``chat`` with the arguments of tool calls as JSON text."""
    copy = []
    for message in chat:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [_call_as_json(call) for call in message["tool_calls"]]
        copy.append(message)
    return copy


def _call_as_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        return dict(call)
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _text_content(content: Any, index: int) -> str | list[dict[str, Any]]:
    """A message's content: a string as it is, or a list with every part as ``{"type": "text", ...}``."""
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(_list(content, f"messages[{index}].content")):
        where = f"messages[{index}].content[{i}]"
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise ChatError(f"{where} has type {kind!r}, but this model takes text only (type 'text')")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ChatError(f"{where} is of type {kind!r} and needs a string for its text, not {_kind(text)}")
        parts.append({"type": "text", "text": text})
    return parts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ChatError(f"{where} must be an object with a function")
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise ChatError(f"{where}.function needs a name")
    function["arguments"] = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": function}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as fault:
            raise ChatError(f"{where} is no valid JSON: {fault}") from fault
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ChatError(f"{where} must be a JSON object, not {_kind(arguments)}")
    return dict(arguments)


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ChatError(f"{where} must be a list, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")
