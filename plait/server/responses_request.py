"""``POST /v1/responses``: bodies, and what they mean as a conversation. Nothing is stored."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any, ClassVar

from pydantic import Field

from plait.core.sampling_params import SamplingParams
from plait.server.errors import APIError
from plait.server.protocol import Body, Neutral, checked_params
from plait.server.structure import Form, of_response_format
from plait.server.tools import Toolbox, toolbox

_NOT_SERVED: Neutral = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": (),
    "moderation": (),
}
_REASONING = "reasoning.encrypted_content"


class ResponsesRequest(Body):
    """Body of ``POST /v1/responses``."""

    not_served: ClassVar[Neutral] = _NOT_SERVED
    example: ClassVar[dict[str, Any]] = {"input": "Who are you?", "max_output_tokens": 64}

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] = Field([])

    # Labels for the client's own records: they ask for nothing.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    chat_template_kwargs: dict[str, Any] = Field({})
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    priority: int = Field(0, ge=-(2**63), lt=2**63)
    cache_salt: str | None = None
    timeout: float | None = Field(None, gt=0, le=10**6)

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Sampling parameters over the model's ``defaults``."""
        values = dict(defaults)
        for name in ("temperature", "top_p"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        try:
            return checked_params(**values, max_tokens=self.max_output_tokens)
        except APIError as error:
            if error.param == "max_tokens":
                message = error.message.replace("max_tokens", "max_output_tokens", 1)
                raise APIError(400, message, "max_output_tokens") from None
            raise

    def effort(self) -> str | None:
        """``reasoning.effort``; refuses the rest of what ``reasoning``, ``text`` and ``include`` may ask.

        Raises:
            APIError: names the field.
        """
        reasoning, text = self.reasoning or {}, self.text or {}
        if unknown := {k for k, v in reasoning.items() if v is not None} - {"effort", "summary"}:
            name = f"reasoning.{min(unknown)}"
            raise APIError(400, f"{name} is not served; leave it out", name)
        if reasoning.get("summary") not in (None, "auto", "detailed", "none"):
            message = "reasoning.summary must be 'auto' or 'detailed' (the reasoning itself) or 'none'"
            raise APIError(400, message, "reasoning.summary")
        if unknown := {k for k, v in text.items() if v is not None} - {"format"}:
            name = f"text.{min(unknown)}"
            raise APIError(400, f"{name} is not served; leave it out", name)
        if unknown := set(self.include) - {_REASONING}:
            raise APIError(400, f"include: {min(unknown)!r} is not served", "include")
        if unknown := (self.stream_options or {}).keys() - {"include_obfuscation"}:
            raise APIError(400, f"stream_options has an unknown field {min(unknown)!r}", "stream_options")
        effort = reasoning.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise APIError(400, "reasoning.effort must be a string", "reasoning.effort")
        return effort

    async def form(self) -> Form | None:
        """``text.format``. Raises APIError where it cannot be had."""
        if (given := (self.text or {}).get("format")) is None:
            return None
        return await asyncio.to_thread(of_response_format, given, "text.format", nested=False)

    @property
    def wants_summary(self) -> bool:
        """Reasoning is to come as its own summary."""
        return (self.reasoning or {}).get("summary") in ("auto", "detailed")

    @property
    def wants_encrypted(self) -> bool:
        """Reasoning is to come in a form that the client can send back."""
        return _REASONING in self.include

    def toolbox(self) -> Toolbox:
        """The tools, which have no ``function`` around their fields here."""
        declared = []
        for tool in self.tools:
            fields = {key: value for key, value in tool.items() if key != "type" and value is not None}
            kind = tool.get("type")
            declared.append({"type": kind, "function": fields} if kind == "function" else tool)
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return toolbox(declared, choice, self.parallel_tool_calls)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the form of the chat API.

        Raises:
            APIError: an item that cannot be read, by its place.
        """
        if isinstance(self.input, str):
            items: list[dict[str, Any]] = [{"role": "user", "content": self.input}]
        else:
            items = self.input
        made = _Messages(self.instructions)
        for i, item in enumerate(items):
            made.add(item, f"input[{i}]")
        if not made.messages:
            raise APIError(400, "input is empty: it must hold at least one item", "input")
        return made.messages


class _Messages:
    """Items become messages: what the assistant thought, said and called in one turn is one message."""

    def __init__(self, instructions: str | None):
        self.messages: list[dict[str, Any]] = []
        self._thought: list[str] = []
        if instructions:
            self.messages.append({"role": "system", "content": instructions})

    def add(self, item: dict[str, Any], where: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                self._assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                self._tool_result(item, where)
            case "reasoning":
                self._thought.append(_reasoning(item, where))
            case kind:
                raise APIError(400, f"{where} has type {kind!r}, which is not served", "input")

    def _assistant(self) -> dict[str, Any]:
        """The assistant's message of this turn."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._thought:
            self.messages.append({"role": "assistant", "content": ""})
        message = self.messages[-1]
        if self._thought:
            message["reasoning_content"] = "\n\n".join(self._thought)
            self._thought = []
        return message

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            message = self._assistant()
            if message["content"] or "tool_calls" in message:
                message = {"role": "assistant"}
                self.messages.append(message)
            message["content"] = content
            return
        if role == "developer":
            role = "system"
        if role not in ("user", "system"):
            raise APIError(400, f"{where}.role must be user, assistant, system or developer", "input")
        leads = len(self.messages) == 1 and self.messages[0]["role"] == "system"
        if role == "system" and leads and isinstance(content, str):
            first = self.messages[0]["content"]
            if isinstance(first, str):  # templates want one system message, at the front
                self.messages[0]["content"] = f"{first}\n\n{content}"
                return
        self.messages.append({"role": role, "content": content})

    def _tool_result(self, item: dict[str, Any], where: str) -> None:
        output = item.get("output")
        if not isinstance(output, str | list):
            raise APIError(400, f"{where}.output must be a string or a list of parts", "input")
        self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})


def _reasoning(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item, from its content, its summary, or from what ``encrypted`` made of it."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise APIError(400, f"{where}.{name} must be a list of parts", "input")
        texts = [part.get("text") for part in parts]
        if all(isinstance(text, str) for text in texts) and texts:
            return "\n\n".join(map(str, texts))
    sealed = item.get("encrypted_content")
    if sealed is None:
        return ""
    try:
        return base64.b64decode(str(sealed).encode(), validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise APIError(400, f"{where}.encrypted_content is not of this server", "input") from None


def encrypted(text: str) -> str:
    """Reasoning in a form that clients pass on unread. It is no secret: the text is in the item as well."""
    return base64.b64encode(text.encode()).decode()
