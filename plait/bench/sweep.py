"""The same traffic over several values of one setting, and the Pareto curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from plait.config import EngineArgs


@dataclass(frozen=True, slots=True)
class Sweep:
    """A setting and the values it takes: "max_concurrency", "request_rate", or an engine setting."""

    name: str
    values: tuple[Any, ...]

    @property
    def of_traffic(self) -> bool:
        """Whether it is the traffic that changes, so that one engine serves all points."""
        return self.name in TRAFFIC

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From "concurrency=1,2,4" or "max_num_batched_tokens=64,256".

        Raises:
            ValueError: not of this form, or not a setting.
        """
        name, equals, values = text.partition("=")
        name = _ALIASES.get(name.strip(), name.strip()).replace("-", "_")
        if not equals or not values:
            raise ValueError(f"--over {text!r}: write a setting and its values, as in concurrency=1,2,4")
        kind = TRAFFIC.get(name)
        parts = [value.strip() for value in values.split(",")]
        if kind is None:
            return cls(name, tuple(setting(name, value) for value in parts))
        try:
            return cls(name, tuple(kind(value) for value in parts))
        except ValueError as error:
            raise ValueError(f"--over {text!r}: {error}") from None


TRAFFIC: dict[str, type] = {"max_concurrency": int, "request_rate": float}
_ALIASES = {"concurrency": "max_concurrency", "chunk": "max_num_batched_tokens", "rate": "request_rate"}


def setting(name: str, text: str) -> Any:
    """The value of an engine setting from text.

    Raises:
        ValueError: there is no such setting, or the text is no value for it.
    """
    known = {f.name for f in fields(EngineArgs)} - {"model"}
    if name not in known:
        raise ValueError(f"{name!r} is no engine setting; there are {', '.join(sorted(known))}")
    kind = str(get_type_hints(EngineArgs)[name])
    if "None" in kind and text.lower() == "none":
        return None
    if "bool" in kind:
        words = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        if text.lower() not in words:
            raise ValueError(f"{name}={text!r}: write true or false")
        return words[text.lower()]
    for word, make in (("int", int), ("float", float)):
        if word in kind:
            try:
                return make(text)
            except ValueError:
                if "str" not in kind:
                    raise ValueError(f"{name}={text!r}: write a number") from None
    return text


def overrides(text: str) -> dict[str, Any]:
    """Engine settings from "name=value,name=value"; nothing from "" or "default"."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not name or name == "default":
            continue
        if not equals:
            raise ValueError(f"{text!r}: write settings as name=value, separated by commas, or default")
        name = name.replace("-", "_")
        found[name] = setting(name, value)
    return found


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (speed per user, throughput), whether no other point is at least as good in both and better
    in one."""
    return [
        not any(
            other[0] >= point[0] and other[1] >= point[1] and tuple(other) != tuple(point) for other in points
        )
        for point in points
    ]
