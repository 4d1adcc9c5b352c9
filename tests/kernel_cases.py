"""Builds tests/native, a program that runs every kernel without Python, and reads what it records."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
BUILDS = ROOT / "build" / "cases"
"""Apart from what `pip install` builds, and kept: a second run compiles what has changed."""

AARCH64_COMPILER = "aarch64-linux-gnu-g++"
AARCH64 = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={AARCH64_COMPILER}",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",  # so that the emulator needs no libraries of that architecture
)

Records = dict[str, np.ndarray]
"""Outputs by the name of their case."""


def tools() -> dict[str, str]:
    """The environment, with this interpreter's own programs (cmake, ninja) found first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def lacking(*programs: str) -> str | None:
    """The first of the programs that is not there."""
    return next((name for name in programs if shutil.which(name, path=tools()["PATH"]) is None), None)


def command(words: Sequence[str | Path], **settings: str) -> str:
    """Runs it; its standard output. Fails with all that it said."""
    done = subprocess.run(words, cwd=ROOT, env={**tools(), **settings}, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout[-4000:] + done.stderr[-4000:]
        raise RuntimeError(f"{' '.join(map(str, words))}: ended with {done.returncode}\n{said}")
    return done.stdout


def build(directory: Path, *options: str) -> None:
    """Configures with options of cmake, and compiles what is new."""
    generator = () if lacking("ninja") else ("-G", "Ninja")
    command(["cmake", "-S", ROOT, "-B", directory, *generator, "-DPLAIT_KERNEL_CASES=ON", *options])
    command(["cmake", "--build", directory, "--parallel", str(os.cpu_count())])


def build_cases(name: str, *options: str) -> Path:
    """The program, built without the Python module."""
    build(BUILDS / name, "-DPLAIT_EXTENSION=OFF", *options)
    return BUILDS / name / "kernel_cases"


def read(path: Path) -> Records:
    """A file of tests/native/record.hpp."""
    found: Records = {}
    with path.open("rb") as file:
        while line := file.readline():
            name, kind, count = line.decode().split()
            dtype = np.dtype(f"<{kind}")
            data = file.read(int(count) * dtype.itemsize)
            assert name not in found
            found[name] = np.frombuffer(data, dtype, int(count))
    return found


def differences(ours: Records, theirs: Records) -> list[str]:
    """Cases whose bits differ, each with the first place where they do, and cases that one of them lacks."""
    found = [f"{name}: not in both" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"{name}: {a.dtype} {a.shape} against {b.dtype} {b.shape}")
            continue
        bits = f"u{a.itemsize}"
        places = np.flatnonzero(a.view(bits) != b.view(bits))
        if places.size:
            at = places[0]
            found.append(f"{name}: {places.size} of {a.size}, first [{at}]: {a[at]} against {b[at]}")
    return found
