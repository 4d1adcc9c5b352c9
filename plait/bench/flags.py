"""Flags made from the fields of a settings class, for commands that share them."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer


def with_flags(
    settings: type, keyword: str, panel: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one flag per field of the dataclass ``settings``.

    The command takes a keyword argument ``keyword``, which it receives as an instance. Fields carry their
    help text in ``metadata["help"]``.
    """
    parameters = _parameters(settings, panel)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def run(*positional: Any, **given: Any) -> Any:
            values = {name: given.pop(name) for name in parameters}
            return command(*positional, **given, **{keyword: settings(**values)})

        kept = [p for p in own.parameters.values() if p.name != keyword]
        run.__signature__ = inspect.Signature([*kept, *parameters.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*kept, *parameters.values()]}
        return run

    return decorate


def _parameters(settings: type, panel: str) -> dict[str, inspect.Parameter]:
    hints = typing.get_type_hints(settings)
    parameters = {}
    for field in fields(settings):
        flag = "--" + field.name.replace("_", "-")
        kind = hints[field.name]
        members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if bool in members:
            flag = f"{flag}/--no-{flag[2:]}"
        option = typer.Option(
            flag,
            help=field.metadata["help"],
            rich_help_panel=panel,
            show_default=field.default not in (None, ""),
        )
        parameters[field.name] = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, option],
        )
    return parameters
