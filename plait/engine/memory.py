"""How much memory there is, and how much of it is ours. Linux; elsewhere what the system tells."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


OTHERS = 0.9
"""Part of the memory at hand that a share of the machine's memory may come to: others grow, too."""


def parse_bytes(text: int | str) -> int:
    """Bytes from a number or a text such as "2GiB", "1.5G" or "800 MB".

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", str(text), re.IGNORECASE)
    unit = match[2].lower() if match else None
    if (
        match is None
        or unit not in _UNITS
        or match[1].count(".") > 1
        or match[1] == "."
        or len(match[1]) > 20
    ):
        raise ValueError(f"{str(text)[:40]!r} is no amount of memory; write bytes, or for example 2GiB")
    return int(float(match[1]) * _UNITS[unit])


def in_words(amount: float) -> str:
    """Bytes for people: "1.50 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def memory_share(share: float | str, name: str = "gpu_memory_utilization") -> tuple[int, str]:
    """Bytes that a share of the machine's memory is, and how that was found. ``name`` is for errors.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """
    try:
        part = float(share)
    except (TypeError, ValueError):
        part = 0.0
    if not 0 < part <= 1:
        raise ValueError(f"{name} {share}: it must be above 0 and at most 1")
    total, free = total_bytes(), available_bytes()
    limit = int(part * total)
    why = f"{part:g} of {in_words(total)}, weights included"
    if free is not None and limit > (most := int(OTHERS * free)):
        limit, why = most, f"{why}, but other processes leave {in_words(free)}"
    return limit, why


def memory_bytes(pid: int | None = None) -> int:
    """Memory of this process, or of another of this user: proportional set size, or this one's peak resident
    size where that is unknown."""
    try:
        for line in Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_bytes() -> int:
    """Memory of the machine, or of this control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return min(total, int(Path(file).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max": no limit
    return total


def available_bytes() -> int | None:
    """Memory that can be had without swapping: the system's, or what is left of this group's limit."""
    system = _system_available()
    group = _group_left()
    known = [amount for amount in (system, group) if amount is not None]
    return min(known) if known else None


def _system_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _group_left() -> int | None:
    """What a container's memory limit leaves (control groups, version 2, then 1)."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max": no limit
    return None
