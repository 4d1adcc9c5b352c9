"""Writes docs/flags.md: every flag of ``plait``, from the commands themselves.

``make docs`` runs it. ``tests/test_docs.py`` fails where the page is not what this makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperOption
from typer.main import get_command

from plait.cli import app
from plait.cli_help import arrange
from plait.cli_options import ENGINE_COMMANDS
from plait.config import EngineArgs
from plait.foreign import FOREIGN

PAGE = Path(__file__).parent.parent / "docs" / "flags.md"
HEAD = """# Flags

<!-- Made by tools/flags_page.py: `make docs` writes it anew. -->

The same words as `plait COMMAND --help`. Settings of the engine are keywords of `LLM(...)` too, with
underscores: `--max-model-len 4096` is `max_model_len=4096`. Flags may be written with underscores, and with
`=`. What a default comes to on this machine, and why, says `plait explain MODEL`.

`BYTES` may have a unit, where the text says so: `2GiB`, `1.5G`, `800MB`. `--x/--no-x` turn something on and
off.
"""
FOREIGN_HEAD = """## Flags of vLLM that plait has no need of

A command line for vLLM can be kept. Besides the flags above, which mean there what they mean here, these are
accepted: plait says in a line what it does instead. Where values are listed, any other is refused.

| flag | values | plait says |
|---|---|---|"""
WORDS = {"plait serve": "the engine's flags", "plait bench serve": "those of traffic and output"}


def page() -> str:
    """The whole page."""
    command: Any = arrange(get_command(app))
    commands = command.commands
    known = {"plait serve": _of_engine(commands["serve"])}
    parts = [HEAD, *_section("plait serve", commands["serve"], {})]
    for name in (name for name in ENGINE_COMMANDS if name != "serve"):
        parts += _section(f"plait {name}", commands[name], known)
    for name in sorted(commands.keys() - {*ENGINE_COMMANDS, "bench"}):
        parts += _section(f"plait {name}", commands[name], {})
    for name, one in commands["bench"].commands.items():
        parts += _section(f"plait bench {name}", one, known)
        if name == "serve":
            known["plait bench serve"] = _names(one, ("Traffic", "Output"))
    parts += [FOREIGN_HEAD, *_foreign()]
    return "\n".join(parts) + "\n"


def _of_engine(command: Any) -> set[str]:
    settings = {field.name for field in fields(EngineArgs)}
    return {param.name for param in command.params if param.name in settings - {"model"}}


def _names(command: Any, groups: Iterable[str]) -> set[str]:
    return {param.name for param in command.params if getattr(param, "rich_help_panel", None) in groups}


def _section(title: str, command: Any, known: dict[str, set[str]]) -> Iterator[str]:
    """A command. Flags that it has in common with one above are named in a word."""
    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    options = [param for param in command.params if isinstance(param, TyperOption) and param.name != "help"]
    called = " ".join([title, *(_called(argument) for argument in arguments)])
    yield f"## {title}\n\n`{called}`: {_cell(command.help.strip())}\n"
    for argument in arguments:
        yield f"* `{_called(argument)}`: {_cell(argument.help or '')}"
    if arguments:
        yield ""
    for above, names in known.items():
        if names <= {option.name for option in options}:
            options = [option for option in options if option.name not in names]
            yield f"Besides these: {WORDS[above]}, as of `{above}`.\n"
    for group in dict.fromkeys(option.rich_help_panel for option in options):
        if group:
            yield f"### {group}\n"
        yield from _table(option for option in options if option.rich_help_panel == group)


def _called(argument: Any) -> str:
    return argument.name.upper() if argument.required else f"[{argument.name.upper()}]"


def _table(options: Iterable[Any]) -> Iterator[str]:
    yield "| flag | default | meaning |\n|---|---|---|"
    for option in options:
        flag = "/".join([*option.opts, *option.secondary_opts])
        unit = "" if option.is_flag else f" {_unit(option)}"
        meaning = option.help or ""
        if option.envvar:
            names = [option.envvar] if isinstance(option.envvar, str) else option.envvar
            meaning += f" (or {', '.join(f'`{name}`' for name in names)} in the environment)"
        yield f"| `{flag}{unit}` | {_default(option)} | {_cell(meaning)} |"
    yield ""


def _unit(option: Any) -> str:
    return option.metavar or ("NUMBER" if isinstance(option.default, int | float) else "TEXT")


def _default(option: Any) -> str:
    value = option.default() if callable(option.default) else option.default
    if "by default" in (option.help or "").lower():
        return ""
    if option.is_flag:
        return "on" if value else "off"
    if value in (None, "", (), []):
        return ""
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"`{shown}`"


def _foreign() -> Iterator[str]:
    for name, foreign in sorted(FOREIGN.items()):
        flag = "--" + name.replace("_", "-")
        values = "any" if foreign.takes_value else ""
        if foreign.accepts is not None:
            values = ", ".join(f"`{value}`" for value in foreign.accepts if value)
            if not foreign.takes_value:
                values = "off alone"
        yield f"| `{flag}` | {values} | {_cell(foreign.says)} |"


def _cell(text: str) -> str:
    """Text that stands in a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
