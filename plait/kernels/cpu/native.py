"""The compiled extension, where it was built, and the choice of its instruction set.

Kernels are compiled once per instruction set, and all of them give the same bits. The best that the processor
has is used; ``PLAIT_CPU_ISA`` names another, for tests and for finding faults.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

MISSING: str | None = None
"""Why there is no extension, in words for a user; None when there is one."""

native: Any = None
"""The module ``plait.kernels.cpu._native``; None when it was not built. It takes addresses as integers and
checks nothing: shapes, types and lifetimes are the caller's."""

ISA_VARIABLE = "PLAIT_CPU_ISA"

try:
    native = importlib.import_module("plait.kernels.cpu._native")
    if os.environ.get(ISA_VARIABLE):
        native.use_isa(os.environ[ISA_VARIABLE])
except ImportError as fault:
    MISSING = (
        f"its C++ kernels were not built ({fault}); install a C++20 compiler, such as g++ 11, and install "
        "plait again"
    )
except ValueError as fault:
    raise ValueError(f"{ISA_VARIABLE}: {fault}") from fault


def isa() -> str:
    """The instruction set in use."""
    return str(native.isa())


def isas() -> list[str]:
    """Those that this processor has, from the slowest to the fastest."""
    return list(native.isas())
