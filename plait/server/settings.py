"""What the user may set about the server; the engine's settings are in ``plait.config``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from plait.logs import LogSettings
from plait.server.tracing import check_endpoint
from plait.text.parsing.formats import REASONING_PARSERS, TOOL_PARSERS

UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What a chat template is given by the request's own fields, and by no variable."""


def _flag(default: Any, help: str, *flags: str) -> Any:
    """A field that the command line makes a flag of, by its name unless ``flags`` say otherwise."""
    return field(default=default, metadata={"help": help, "flags": flags})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP server: flags of ``plait serve``."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | Sequence[str] | None = None
    """if set, /v1 paths ask for ``Authorization: Bearer <key>``; of several any will do"""
    root_path: str = ""
    """path under which a proxy shows the server"""
    uvicorn_log_level: str = "warning"
    shutdown_timeout: float = 20.0
    """seconds that running requests get to end after SIGTERM"""

    api_server_count: int = _flag(1, "Processes that answer HTTP, in front of one engine.")

    exit_with_engine: bool = _flag(
        False,
        "End the server when its engine process dies; else it stays and answers 503.",
        "--exit-with-engine",
    )

    ssl_certfile: str | None = _flag(
        None, "PEM file of the server's certificate (and those between it and the root); turns TLS on."
    )
    ssl_keyfile: str | None = _flag(None, "PEM file of its key, unless the certificate's file holds it.")
    ssl_ca_certs: str | None = _flag(None, "PEM file of the authorities that sign clients' certificates.")
    ssl_cert_reqs: int = _flag(0, "Whether clients show a certificate: 0 no, 1 they may, 2 they must.")

    allowed_origins: Sequence[str] = _flag(
        (), 'Origins whose web pages may call the server, one by one or as JSON; ["*"]: all. Default: none.'
    )
    allowed_methods: Sequence[str] = _flag(("*",), "HTTP methods that those pages may use.")
    allowed_headers: Sequence[str] = _flag(("*",), "Headers that those pages may send.")
    allow_credentials: bool = _flag(False, "Let those pages send cookies.", "--allow-credentials")

    log_format: str = _flag("text", "text, or json: one object a line, with the fields of each event.")
    log_level: str = _flag("info", "debug, info, warning, error or critical: plait's own lines.")
    disable_access_log: bool = _flag(
        False, "No line for each HTTP request.", "--disable-access-log", "--disable-uvicorn-access-log"
    )
    disable_access_log_for_endpoints: str = _flag("", "Paths without such lines, apart by commas.")
    enable_log_requests: bool = _flag(
        False, "A line for each request to the engine, with its prompt and parameters."
    )
    max_log_len: int | None = _flag(None, "Most characters (or token ids) of a prompt in these lines.")
    disable_log_stats: bool = _flag(
        False, "No line with throughput and memory while there is work.", "--disable-log-stats"
    )
    log_stats_interval: float = _flag(10.0, "Seconds between two of these lines.")

    otlp_traces_endpoint: str | None = _flag(
        None, "Send a span for each request there: OTLP over HTTP, such as http://localhost:4318/v1/traces."
    )

    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """handed to the chat template unless the request says otherwise"""

    reasoning_parser: str | None = None
    """format of the model's reasoning; None: as its chat template shows"""
    tool_call_parser: str | None = None
    """format of the model's tool calls; None: as its chat template shows"""
    enable_auto_tool_choice: bool = True
    """let the model choose whether to call a tool"""

    max_waiting: int | None = None
    """most requests that wait for their first token; one more gets a 429. None: no bound"""
    stream_interval: int = 1
    """tokens between two events of a stream, after the first"""
    max_body_bytes: int = 32 * 2**20
    """largest body of a request"""
    max_prompt_tokens: int | None = None
    """longest prompt; None: what the model's length allows"""

    client_timeout: float = 60.0
    """seconds that a client may take to send a request's headers, its body, or to read what is ready"""
    max_connections: int = 4096
    """connections at once"""

    debug: bool = False
    """serve ``/debug``, which shows what clients have sent"""
    priorities: bool = False
    """the engine runs requests by priority; otherwise one that brings a priority is refused"""

    @property
    def api_keys(self) -> tuple[str, ...]:
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)

    @property
    def logs(self) -> LogSettings:
        return LogSettings(self.log_level, self.log_format)

    @property
    def traces_endpoint(self) -> str | None:
        return None if self.otlp_traces_endpoint is None else check_endpoint(self.otlp_traces_endpoint)

    @property
    def secure(self) -> bool:
        """Whether the server speaks TLS."""
        return self.ssl_certfile is not None

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("--api-key is empty, and would let nobody in; leave it out, or give a key")
        if not 1 <= self.api_server_count <= 64:
            raise ValueError(f"--api-server-count {self.api_server_count}: it must be from 1 to 64")
        _ = self.traces_endpoint  # refuses what cannot work
        LogSettings(self.log_level, self.log_format)  # refuses others
        if not self.log_stats_interval > 0:
            raise ValueError(f"--log-stats-interval {self.log_stats_interval}: it must be above 0")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ValueError(f"--ssl-cert-reqs {self.ssl_cert_reqs}: 0 none, 1 optional, 2 required")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "--allow-credentials with --allowed-origins * would let every web page act as its visitor: "
                "name the origins"
            )
        if not 0 < self.client_timeout <= 10**6:
            raise ValueError(
                f"client_timeout={self.client_timeout}: it must be above 0, at most 1000000 seconds"
            )
        bounds = (
            "max_waiting", "stream_interval", "max_body_bytes", "max_prompt_tokens", "max_connections",
            "max_log_len",
        )  # fmt: skip
        for name in bounds:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it must be from 1 up")
        for name, known in (("reasoning_parser", REASONING_PARSERS), ("tool_call_parser", TOOL_PARSERS)):
            value = getattr(self, name)
            if value is not None and value not in (*known, "none"):
                raise ValueError(f"{name}={value!r}: it must be one of {', '.join((*known, 'none'))}")
        taken = sorted(TEMPLATE_ARGUMENTS & self.default_chat_template_kwargs.keys())
        if taken:
            raise ValueError(
                f"default_chat_template_kwargs must not set {taken[0]}: it comes from the request"
            )


def flags_of(name: str) -> tuple[str, ...]:
    """The flags of a setting on the command line."""
    [setting] = [field for field in fields(ServerSettings) if field.name == name]
    flags: tuple[str, ...] = setting.metadata["flags"]
    return flags or ("--" + name.replace("_", "-"),)
