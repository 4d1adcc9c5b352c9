"""Flags of the command line: those of the engine are made from the fields of ``EngineArgs``."""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from plait.config import EngineArgs
from plait.foreign import FOREIGN, answer_to
from plait.logs import LogSettings

ENGINE_COMMANDS = ("serve", "generate", "chat", "explain", "eval")


def with_engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` one flag per engine setting.

    ``command`` takes a first argument ``model`` and a keyword ``args``, which it receives as EngineArgs.
    """
    own = inspect.signature(command, eval_str=True)
    flags = _engine_parameters()

    @functools.wraps(command)
    def run(model: str, **given: Any) -> Any:
        settings = {name: given.pop(name) for name in flags}
        return command(model, args=EngineArgs(model=model, **settings), **given)

    kept = [p for p in own.parameters.values() if p.name != "args"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*kept, *flags.values()]]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _engine_parameters() -> dict[str, inspect.Parameter]:
    hints = typing.get_type_hints(EngineArgs)
    parameters = {}
    for field in fields(EngineArgs):
        if field.name == "model":
            continue
        flag = "--" + field.name.replace("_", "-")
        kind = hints[field.name]
        members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if bool in members:
            flag = f"{flag}/--no-{flag[2:]}"
        if str in members and (int in members or dict[str, Any] in members):
            kind = str | None  # a number with a unit, or without; an object as JSON
        option = typer.Option(
            flag,
            help=field.metadata["help"],
            rich_help_panel="Engine",
            show_default=field.default not in (None, ""),
        )
        parameters[field.name] = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, option],
        )
    return parameters


def with_server_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` one flag for each field of ServerSettings that has a help text.

    ``command`` takes a keyword ``more``, in which it receives them.
    """
    own = inspect.signature(command, eval_str=True)
    flags = server_parameters()

    @functools.wraps(command)
    def run(*positional: Any, **given: Any) -> Any:
        more = {name: given.pop(name) for name in flags}
        for name, value in more.items():
            if isinstance(value, list):
                more[name] = _texts(name, value)
        return command(*positional, more=more, **given)

    parameters = [p for p in own.parameters.values() if p.name != "more"] + list(flags.values())
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@functools.cache
def server_parameters() -> dict[str, inspect.Parameter]:
    """Flags of the server, by the name of the setting."""
    from plait.server.settings import ServerSettings, flags_of

    hints = typing.get_type_hints(ServerSettings)
    parameters = {}
    for field in fields(ServerSettings):
        if "help" not in field.metadata:
            continue
        kind, default = hints[field.name], field.default
        if kind == Sequence[str]:
            kind, default = list[str], list(default)  # type: ignore[arg-type]
        flags = flags_of(field.name)
        shown = default not in (None, "", []) and kind is not bool
        help = field.metadata["help"]
        option = typer.Option(*flags, help=help, rich_help_panel="Server", show_default=shown)
        parameters[field.name] = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )
    return parameters


def _server_flags() -> set[str]:
    from plait.server.settings import flags_of

    return {flag for setting in server_parameters() for flag in flags_of(setting)}


def log_settings_of(argv: list[str]) -> LogSettings:
    """How a command is to log. Read before the command line is, whose reading may have something to say.

    Raises:
        ValueError: a level or format that does not exist.
    """
    if not argv or argv[0] != "serve":
        return LogSettings()
    given = {"--log-level": "info", "--log-format": "text"}
    for i, token in enumerate(argv):
        flag, equals, value = token.partition("=")
        if flag in given:
            given[flag] = value if equals else "".join(argv[i + 1 : i + 2])
    return LogSettings(given["--log-level"], given["--log-format"])


def _texts(name: str, given: list[str]) -> list[str]:
    """Texts that were given one by one, or as lists in JSON."""
    texts: list[str] = []
    for text in given:
        if not text.lstrip().startswith("["):
            texts.append(text)
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"--{name.replace('_', '-')} is not valid JSON: {error}") from None
        texts += map(str, value)
    return texts


def take_foreign(argv: list[str]) -> tuple[list[str], list[str]]:
    """Take settings of vLLM out of a command line, and write flags with dashes.

    Returns:
        The rest of the command line, and what to say about each flag taken out.

    Raises:
        ValueError: a flag asks for what plait cannot do.
    """
    if not argv or argv[0] not in ENGINE_COMMANDS:
        return argv, []
    rest: list[str] = []
    lines: list[str] = []
    own = _server_flags() if argv[0] == "serve" else set()
    tokens = iter(argv)
    for token in tokens:
        if token == "--":
            rest += [token, *tokens]
            break
        flag, equals, value = token.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            rest.append(token)
        elif name in FOREIGN and flag.replace("_", "-") not in own:
            asked: str | bool
            if not FOREIGN[name].takes_value:
                asked = value.lower() not in ("false", "0", "no") if equals else True
            else:
                value = value if equals else next(tokens, "")
                if not value or value.startswith("--"):
                    raise ValueError(f"{flag} takes a value")
                asked = value
            line = _say(name, asked)
            lines += [line] if line else []
        elif name.startswith("no_") and name[3:] in FOREIGN and not FOREIGN[name[3:]].takes_value:
            pass  # turned off: nothing is asked for
        else:
            rest.append("--" + name.replace("_", "-") + equals + value)
    return rest, lines


def flags_for_names(message: str) -> str:
    """A message about settings, with their names as they stand on a command line."""
    for setting in fields(EngineArgs):
        flag = "--" + setting.name.replace("_", "-")
        if "_" in setting.name:
            message = re.sub(rf"(?<![\w-]){setting.name}=", f"{flag} ", message)
            message = re.sub(rf"(?<![\w-]){setting.name}\b", flag, message)
        else:
            message = re.sub(rf"(?<![\w-]){setting.name}=", f"{flag} ", message)
    return message


def _say(name: str, value: object) -> str | None:
    flag = "--" + name.replace("_", "-")
    try:
        line = answer_to(name, value)
    except ValueError as error:
        raise ValueError(str(error).replace(name, flag, 1)) from None
    return line.replace(name, flag, 1) if line else None
