"""Kernel backends by name. A backend is chosen once, at start, and never falls back silently."""

from __future__ import annotations

import importlib

from plait.kernels.backend import Backend

_BUILT_IN = ("plait.kernels.reference", "plait.kernels.cpu.backend")
"""Modules that register the backends plait ships; imported when a backend is first asked for."""

_backends: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Make ``backend`` known under ``backend.name``.

    Raises:
        ValueError: the name is taken, or is "auto".
    """
    if backend.name == "auto":
        raise ValueError('"auto" cannot name a kernel backend: it asks for the best one')
    if backend.name in _backends:
        raise ValueError(f"a kernel backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend
    return backend


def backend_names() -> tuple[str, ...]:
    """Names of all backends, in alphabetical order."""
    _load_built_in()
    return tuple(sorted(_backends))


def get_backend(name: str = "auto", device: str = "cpu") -> Backend:
    """The backend called ``name``, or with "auto" the one of highest priority that runs on ``device``.

    Args:
        name: a registered name, or "auto".
        device: a torch device, such as "cpu" or "cuda:0".

    Raises:
        ValueError: no such backend, or it cannot run on the device; says which there are and why not.
    """
    _load_built_in()
    if name != "auto":
        if name not in _backends:
            raise ValueError(f"unknown kernel backend {name!r}; there are: {', '.join(backend_names())}")
        reason = _backends[name].unavailable(device)
        if reason:
            raise ValueError(f"kernel backend {name!r} cannot run on {device}: {reason}")
        return _backends[name]
    usable = [backend for backend in _backends.values() if backend.unavailable(device) is None]
    if not usable:
        reasons = "; ".join(f"{b.name}: {b.unavailable(device)}" for b in _backends.values())
        raise ValueError(f"no kernel backend runs on {device} ({reasons})")
    return max(usable, key=lambda backend: (backend.priority, backend.name))


def _load_built_in() -> None:
    for module in _BUILT_IN:
        importlib.import_module(module)
