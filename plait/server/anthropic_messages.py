"""``POST /v1/messages``: bodies of the Anthropic API, and what they mean as a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import Field

from plait.core.sampling_params import SamplingParams
from plait.server.errors import APIError
from plait.server.prompts import Turn
from plait.server.protocol import Body, Neutral, checked_params
from plait.server.tools import Toolbox, toolbox

_NOT_SERVED: Neutral = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
    "output_config": ({},),
    "output_format": (),
    "inference_geo": (),
    "speed": ("standard",),
    "betas": ([],),
}
_EXAMPLE: dict[str, Any] = {
    "model": "MODEL",
    "messages": [{"role": "user", "content": "Who are you?"}],
    "system": "Be brief.",
}


class CountRequest(Body):
    """Body of ``POST /v1/messages/count_tokens``: all of a request that makes its prompt."""

    not_served: ClassVar[Neutral] = _NOT_SERVED
    example: ClassVar[dict[str, Any]] = _EXAMPLE

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def turn(self, default_thinking: bool | None) -> Turn:
        """The conversation.

        Args:
            default_thinking: whether the model thinks where the request does not say; None: as its template
                has it.

        Raises:
            APIError: what cannot be served; names the field.
        """
        messages = [*_system(self.system)]
        for i, message in enumerate(self.messages):
            messages += _message(message, f"messages[{i}]")
        if self.cache_control is not None:
            messages[-1] = messages[-1] | _mark(self.cache_control, "cache_control")
        kwargs = {}
        thinks = self._thinks()
        if thinks is None:
            thinks = default_thinking
        if thinks is not None:
            kwargs["enable_thinking"] = thinks
        return Turn(messages, _toolbox(self.tools, self.tool_choice), kwargs)

    def _thinks(self) -> bool | None:
        if self.thinking is None:
            return None
        kind = self.thinking.get("type")
        allowed = {"enabled": {"type", "budget_tokens", "display"}, "adaptive": {"type", "display"}}
        known = allowed.get(str(kind), {"type"})
        unknown = self.thinking.keys() - known
        if kind not in ("enabled", "adaptive", "disabled"):
            raise APIError(400, "thinking.type must be 'enabled', 'adaptive' or 'disabled'", "thinking")
        if unknown:
            raise APIError(400, f"thinking has an unknown field {min(unknown)!r}", "thinking")
        if self.thinking.get("display") not in (None, "full", "summarized", "omitted"):
            raise APIError(400, "thinking.display must be 'full', 'summarized' or 'omitted'", "thinking")
        return bool(kind != "disabled")

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.get("display") != "omitted"

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of thinking.

        Raises:
            APIError: it is no number of tokens.
        """
        if self.thinking is None or self.thinking.get("type") != "enabled":
            return None
        budget = self.thinking.get("budget_tokens")
        if not isinstance(budget, int) or isinstance(budget, bool) or not 0 < budget < 2**31:
            message = "thinking.budget_tokens must be a number of tokens from 1 up"
            raise APIError(400, message, "thinking.budget_tokens")
        return budget


class MessagesRequest(CountRequest):
    """Body of ``POST /v1/messages``."""

    example: ClassVar[dict[str, Any]] = _EXAMPLE | {"max_tokens": 64}

    max_tokens: int
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = Field([])
    metadata: dict[str, Any] | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Sampling parameters over the model's ``defaults``."""
        values = dict(defaults)
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        budget = self.thinking_budget
        if budget is not None and budget >= self.max_tokens:
            message = f"thinking.budget_tokens={budget} must be below max_tokens={self.max_tokens}"
            raise APIError(400, message, "thinking.budget_tokens")
        try:
            return checked_params(**values, max_tokens=self.max_tokens, stop=self.stop_sequences or None)
        except APIError as error:
            if error.param == "stop":
                raise APIError(400, error.message, "stop_sequences") from None
            raise


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    return [{"role": "system", "content": [_text(block, f"system[{i}]") for i, block in enumerate(system)]}]


def _message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as those of the chat API: a result of a tool is a message of its own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise APIError(400, f"{where}.role must be 'user' or 'assistant'", "messages")
    if unknown := message.keys() - {"role", "content"}:
        raise APIError(400, f"{where} has an unknown field {min(unknown)!r}", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise APIError(400, f"{where}.content must be a string or a list of blocks", "messages")
    blocks = [_block(block, f"{where}.content[{i}]") for i, block in enumerate(content)]
    return _assistant(blocks, where) if role == "assistant" else _user(blocks, where)


def _block(block: Any, where: str) -> tuple[str, dict[str, Any], str]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _BLOCKS:
        raise APIError(400, f"{where} has type {kind!r}; served are {', '.join(_BLOCKS)}", "messages")
    if unknown := block.keys() - _BLOCKS[kind] - {"type", "cache_control"}:
        raise APIError(400, f"{where} has an unknown field {min(unknown)!r}", "messages")
    return kind, block, where


_BLOCKS: dict[str, set[str]] = {
    "text": {"text", "citations"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}

Blocks = Iterable[tuple[str, dict[str, Any], str]]


def _user(blocks: Blocks, where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for kind, block, at in blocks:
        if kind == "tool_result":
            messages.append(_tool_result(block, at))
        elif kind == "text":
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_text(block, at))
        else:
            raise APIError(400, f"{at}: {kind} belongs to the assistant", "messages")
    return messages


def _assistant(blocks: Blocks, where: str) -> list[dict[str, Any]]:
    parts, thoughts, calls, marks = [], [], [], {}
    for kind, block, at in blocks:
        if kind == "text":
            parts.append(_text(block, at))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            if not isinstance(block.get("input", {}), dict):
                raise APIError(400, f"{at}.input must be an object", "messages")
            function = {"name": _string(block, "name", at), "arguments": block.get("input", {})}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
            if "cache_control" in block:
                marks = _mark(block["cache_control"], at)
        else:
            raise APIError(400, f"{at}: {kind} belongs to the user", "messages")
    message: dict[str, Any] = {"role": "assistant", "content": parts or "", **marks}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content", "")
    if isinstance(content, list):
        texts = []
        for i, part in enumerate(content):
            kind, inner, at = _block(part, f"{where}.content[{i}]")
            if kind != "text":
                raise APIError(400, f"{at} has type {kind!r}; only text is served there", "messages")
            texts.append(_text(inner, at)["text"])
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise APIError(400, f"{where}.content must be a string or a list of text blocks", "messages")
    if block.get("is_error"):
        content = f"Error: {content}"  # templates have no other place for it
    message = {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": content}
    return message | (_mark(block["cache_control"], where) if "cache_control" in block else {})


def _text(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise APIError(400, f"{where} must be a text block", where.partition("[")[0])
    if block.get("citations"):
        raise APIError(400, f"{where}.citations is not served; leave it out", where.partition("[")[0])
    part = {"type": "text", "text": _string(block, "text", where)}
    return part | (_mark(block["cache_control"], where) if "cache_control" in block else {})


def _mark(control: Any, where: str) -> dict[str, Any]:
    if control is None:
        return {}
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        message = f"{where}.cache_control must be {{'type': 'ephemeral'}}"
        raise APIError(400, message, "cache_control")
    if control.get("ttl") not in (None, "5m", "1h"):
        raise APIError(400, f"{where}.cache_control.ttl must be '5m' or '1h'", "cache_control")
    return {"cache_control": control}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise APIError(400, f"{where}.{name} must be a string", "messages")
    return value


def _toolbox(tools: list[dict[str, Any]], choice: dict[str, Any] | None) -> Toolbox:
    declared = []
    for i, tool in enumerate(tools):
        kind = tool.get("type", "custom")
        if kind not in (None, "custom"):
            raise APIError(400, f"tools[{i}] has type {kind!r}: only the client's own are served", "tools")
        known = {"type", "name", "description", "input_schema", "cache_control", "strict"}
        known |= {"eager_input_streaming"}  # arguments always stream as they grow
        if unknown := tool.keys() - known:
            raise APIError(400, f"tools[{i}] has a field that is not served: {min(unknown)!r}", "tools")
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict")}
        given = {key: value for key, value in function.items() if value is not None}
        declared.append({"type": "function", "function": given})
    kind = (choice or {"type": "auto"}).get("type")
    if choice is not None and (unknown := choice.keys() - {"type", "name", "disable_parallel_tool_use"}):
        raise APIError(400, f"tool_choice has an unknown field {min(unknown)!r}", "tool_choice")
    parallel = not (choice or {}).get("disable_parallel_tool_use")
    named = {"type": "function", "function": {"name": (choice or {}).get("name")}}
    chosen = {"auto": "auto", "none": "none", "any": "required", "tool": named}.get(str(kind), kind)
    return toolbox(declared, chosen, parallel)
