"""What the server chose by itself, for the summary at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.server.settings import ServerSettings
from plait.text.parsing import OutputFormat
from plait.text.parsing.formats import reasoning_of, tools_of

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine


def server_decisions(engine: AsyncEngine, settings: ServerSettings) -> list[str]:
    """One line for each."""
    lines = _processes(settings)
    if engine.tokenizer is None or engine.chat_template is None:
        return [*lines, "chat: not served (no chat template; give one with --chat-template)"]
    source = engine.chat_template.source
    form = OutputFormat(engine.tokenizer, source, settings.reasoning_parser, settings.tool_call_parser)
    reasoning = _line("reasoning", form.reasoning, settings.reasoning_parser, reasoning_of(source))
    tools = _line("tool calls", form.tools, settings.tool_call_parser, tools_of(source))
    if form.tools and not settings.enable_auto_tool_choice:
        tools += "; only where tool_choice demands one"
    lines += [reasoning, tools]
    if kwargs := settings.default_chat_template_kwargs:
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        lines.append(f"chat template: {given} unless a request says otherwise")
    return lines


def _processes(settings: ServerSettings) -> list[str]:
    count = settings.api_server_count
    return [f"API processes: {count} (as asked), in front of one engine"] if count > 1 else []


def _line(what: str, holds: str | None, asked: str | None, shown: str | None) -> str:
    value = holds or "not told apart"
    if asked is None:
        return f"{what}: {value} (as the chat template shows)"
    doubt = "" if holds == shown else f"; the chat template shows {shown or 'none'}"
    return f"{what}: {value} (as asked{doubt})"
