"""Bugs planted on purpose: a subclass takes the place of the part it derives from, wherever that is built."""

from __future__ import annotations

import sys

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, *bugs: type) -> None:
    """Each in the modules of the core, and of symbolic memory, that know the part by its name."""
    for bug in bugs:
        (part,) = bug.__bases__
        places = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith(("plait.core.", "symbolic")) and vars(module).get(part.__name__) is part
        ]
        assert places, f"nobody knows a {part.__name__}"
        for module in places:
            monkeypatch.setattr(module, part.__name__, bug)
