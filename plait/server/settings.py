"""What the user may set about the server; the engine's settings are in ``plait.config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What a chat template is given by the request's own fields, and by no variable."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP server: flags of ``plait serve``."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """if set, /v1 paths ask for ``Authorization: Bearer <key>``"""
    root_path: str = ""
    """path under which a proxy shows the server"""
    log_level: str = "warning"
    shutdown_timeout: float = 20.0
    """seconds that running requests get to end after SIGTERM"""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """handed to the chat template unless the request says otherwise"""

    debug: bool = False
    """serve ``/debug``, which shows what clients have sent"""
    priorities: bool = False
    """the engine runs requests by priority; otherwise one that brings a priority is refused"""

    def __post_init__(self) -> None:
        taken = sorted(TEMPLATE_ARGUMENTS & self.default_chat_template_kwargs.keys())
        if taken:
            raise ValueError(
                f"default_chat_template_kwargs must not set {taken[0]}: it comes from the request"
            )
