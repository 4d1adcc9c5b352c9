"""The tools of a request: which functions may be called, and whether one must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.server.errors import APIError
from plait.text.parsing import Function

_NAME = re.compile(r"[A-Za-z0-9_.:\-/]{1,256}")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Functions that the model may call.

    Args:
        declared: as chat templates are given them, in the form of the chat API.
        schemas: name to the JSON schema of its arguments.
        must_call: the answer must be a call.
        only: the function that it must be, if one was named.
        parallel: more than one call may be made.
        strict: functions whose arguments must be what their schema says.
    """

    declared: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    must_call: bool = False
    only: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def functions(self) -> list[Function]:
        """What may be called, for the grammar of a call."""
        names = [self.only] if self.only is not None else list(self.schemas)
        return [Function(name, self.schemas[name], name in self.strict) for name in names]


def toolbox(tools: list[Any] | None, choice: Any = None, parallel: bool = True) -> Toolbox:
    """Read ``tools`` and ``tool_choice`` of the chat API.

    With "none" the tools are left out of the prompt: a model that does not see them cannot call them.

    Raises:
        APIError: one that is no function, or a choice that no tool fits.
    """
    declared: list[dict[str, Any]] = []
    schemas: dict[str, Any] = {}
    strict: set[str] = set()
    for i, tool in enumerate(tools or []):
        name, parameters = _function(tool, f"tools[{i}]")
        if name in schemas:
            raise APIError(400, f"tools[{i}]: there is a function {name!r} already", "tools")
        if tool["function"].get("strict"):
            strict.add(name)
        declared.append(tool)
        schemas[name] = parameters
    must, only = _choice(choice, schemas)
    if choice == "none":
        return Toolbox()
    return Toolbox(declared, schemas, must, only, parallel, frozenset(strict))


def _function(tool: Any, where: str) -> tuple[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        raise APIError(400, f"{where} has type {kind!r}: only functions are served", "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise APIError(400, f"{where}.function must be an object with a name", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where}.function.name must be letters, digits and any of _ - . : /, at most 256"
        raise APIError(400, message, "tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise APIError(400, f"{where}.function.parameters must be a JSON schema (an object)", "tools")
    if not isinstance(function.get("strict"), bool | None):
        raise APIError(400, f"{where}.function.strict must be true or false", "tools")
    unknown = function.keys() - {"name", "description", "parameters", "strict"}
    if unknown:
        raise APIError(400, f"{where}.function has an unknown field {min(unknown)!r}", "tools")
    return name, parameters


def _choice(choice: Any, schemas: Mapping[str, Any]) -> tuple[bool, str | None]:
    """(a call must be made, the function that was named)"""
    match choice:
        case None | "auto" | "none":
            return False, None
        case "required":
            if not schemas:
                raise APIError(400, "tool_choice 'required' needs tools", "tool_choice")
            return True, next(iter(schemas)) if len(schemas) == 1 else None
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in schemas:
                raise APIError(400, f"tool_choice names {name!r}, which is none of tools", "tool_choice")
            return True, name
    raise APIError(
        400,
        "tool_choice must be 'auto', 'none', 'required' or "
        '{"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )
