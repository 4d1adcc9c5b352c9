"""The command line: ``plait serve | generate | chat | pull | explain | bench | eval | version``."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.main import get_command

from plait import __version__, logs
from plait.bench.cli import app as bench
from plait.cli_help import arrange
from plait.cli_options import (
    flags_for_names,
    log_settings_of,
    take_foreign,
    with_engine_flags,
    with_server_flags,
)
from plait.cli_report import Download, Stages, fail, note, show_explanation, show_ready
from plait.config import EngineArgs
from plait.eval.cli import evaluate

app = typer.Typer(
    name="plait",
    help="A serving engine for language models that braid attention with recurrent layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.command("eval")(evaluate)

Model = Annotated[
    str, typer.Argument(help="A folder, a GGUF file, an id on the Hugging Face hub, or a built-in name.")
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"plait {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A serving engine for language models that braid attention with recurrent layers."""


def main() -> None:
    """Entry point of the ``plait`` command."""
    with _clear_errors():
        argv, lines = take_foreign(sys.argv[1:])
        logs.configure(log_settings_of(argv))
        for line in lines:
            note(line)
        arrange(get_command(app))(args=argv, prog_name="plait")


@contextmanager
def _clear_errors() -> Iterator[None]:
    """What the user can mend ends as one message and exit code 2; what is a bug keeps its traceback."""
    from plait.engine.outputs import EngineDeadError

    try:
        yield
    except (ValueError, OSError, EngineDeadError) as error:
        logging.getLogger(__name__).debug("failed", exc_info=error)
        fail(flags_for_names(str(error)) or type(error).__name__)
        raise SystemExit(2) from None


def _server_option(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Server", **more)


@app.command()
@with_engine_flags
@with_server_flags
def serve(
    model: Model,
    *,
    args: EngineArgs,
    host: Annotated[str, _server_option("--host", "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _server_option("--port", "Port to listen on.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        _server_option(
            "--api-key",
            "Key that clients must send; given several times, any of them will do; none by default.",
            envvar=["PLAIT_API_KEY", "VLLM_API_KEY"],
        ),
    ] = None,
    uvicorn_log_level: Annotated[
        str, _server_option("--uvicorn-log-level", "critical, error, warning, info or debug.")
    ] = "warning",
    root_path: Annotated[
        str, _server_option("--root-path", "Path under which a proxy shows the server; none by default.")
    ] = "",
    shutdown_timeout: Annotated[
        float, _server_option("--shutdown-timeout", "Seconds that running requests get to end.", min=0)
    ] = 20.0,
    debug_endpoints: Annotated[
        bool, _server_option("--debug-endpoints", "Serve /debug, which shows what clients have sent.")
    ] = False,
    default_chat_template_kwargs: Annotated[
        str, _server_option("--default-chat-template-kwargs", "JSON object handed to the chat template.")
    ] = "{}",
    reasoning_parser: Annotated[
        str | None,
        _server_option(
            "--reasoning-parser", "qwen3, deepseek_r1 or none; by default as the chat template shows."
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        _server_option(
            "--tool-call-parser",
            "qwen3_coder, hermes, llama3_json, mistral or none; by default as the chat template shows.",
        ),
    ] = None,
    max_waiting: Annotated[
        int | None,
        _server_option(
            "--max-waiting",
            "Most requests that wait for their first token; one more gets a 429. No bound by default.",
            min=1,
        ),
    ] = None,
    stream_interval: Annotated[
        int, _server_option("--stream-interval", "Tokens between two events of a stream.", min=1)
    ] = 1,
    max_body_bytes: Annotated[
        int, _server_option("--max-body-bytes", "Largest body of a request.", min=1)
    ] = 32 * 2**20,
    max_prompt_tokens: Annotated[
        int | None, _server_option("--max-prompt-tokens", "Longest prompt; by default what fits.", min=1)
    ] = None,
    client_timeout: Annotated[
        float,
        _server_option(
            "--client-timeout",
            "Seconds a client may take to send a request's headers, its body, or to read what is ready.",
        ),
    ] = 60.0,
    max_connections: Annotated[
        int,
        _server_option(
            "--max-connections", "Most connections; one more takes the place of the longest idle.", min=1
        ),
    ] = 4096,
    enable_auto_tool_choice: Annotated[
        bool,
        _server_option(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice", "Let the model choose to call tools."
        ),
    ] = True,
    more: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP, with the OpenAI API."""
    from plait.server.decisions import server_decisions
    from plait.server.run import run
    from plait.server.run import serve as run_server
    from plait.server.settings import UVICORN_LOG_LEVELS, ServerSettings

    if uvicorn_log_level not in UVICORN_LOG_LEVELS:
        raise typer.BadParameter(f"--uvicorn-log-level must be one of {', '.join(UVICORN_LOG_LEVELS)}")
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key or None,
        root_path=root_path,
        uvicorn_log_level=uvicorn_log_level,
        shutdown_timeout=shutdown_timeout,
        default_chat_template_kwargs=_json_object(
            "--default-chat-template-kwargs", default_chat_template_kwargs
        ),
        max_waiting=max_waiting,
        stream_interval=stream_interval,
        max_body_bytes=max_body_bytes,
        max_prompt_tokens=max_prompt_tokens,
        client_timeout=client_timeout,
        max_connections=max_connections,
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        debug=debug_endpoints,
        priorities=args.scheduling_policy == "priority",
        **more,
    )
    with Stages(model) as stages:
        run(
            run_server(
                args,
                settings,
                on_stage=stages,
                on_ready=lambda engine, url: show_ready(
                    stages, engine.info, url, server_decisions(engine, settings)
                ),
            )
        )


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{flag} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'{flag} must be a JSON object, such as {{"enable_thinking": false}}')
    return value


def _sampling_option(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Sampling", show_default=False)


MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", help="Most tokens of an answer.", rich_help_panel="Sampling", min=1),
]
Temperature = Annotated[
    float | None, _sampling_option("--temperature", "0 is greedy; the model's by default.")
]
TopP = Annotated[float | None, _sampling_option("--top-p", "Probability mass kept.")]
TopK = Annotated[int | None, _sampling_option("--top-k", "Likeliest tokens kept; 0: all.")]


@app.command()
@with_engine_flags
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; read from standard input if missing.")
    ] = None,
    *,
    args: EngineArgs,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the chat template.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
) -> None:
    """Continue PROMPT with MODEL, and tell how fast it was."""
    from plait.cli_talk import generate_once

    text = sys.stdin.read() if prompt is None or prompt == "-" else prompt
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
    generate_once(args, text, sampling, chat=chat)


@app.command()
@with_engine_flags
def chat(
    model: Model,
    *,
    args: EngineArgs,
    system: Annotated[str | None, typer.Option("--system", help="System prompt to begin with.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
) -> None:
    """Talk with MODEL in the terminal. /exit, /reset and /system TEXT are commands."""
    from plait.cli_talk import talk

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
    talk(args, system, sampling)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A short name, or organisation/model on the hub.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    download_dir: Annotated[str | None, typer.Option("--download-dir", help="Where to keep it.")] = None,
) -> None:
    """Download a model, and print where it lies."""
    from plait.models import hub

    with Download() as download:
        path = hub.pull(name, revision=revision, download_dir=download_dir, progress=download)
    print(path)


@app.command()
@with_engine_flags
def explain(
    model: Model,
    *,
    args: EngineArgs,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tell what MODEL would get on this machine, and why, without loading it."""
    from plait.engine.explain import explain as explain_engine

    show_explanation(explain_engine(args), as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"plait {__version__}")
