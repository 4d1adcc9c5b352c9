"""Runs the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make test-sanitizers`.

They catch reads beyond a row or a page, and arithmetic that C++ leaves undefined. The extension is built
apart from the installed one, in build/sanitizers. First the program of tests/native runs on every instruction
set of this processor, on 1 and 2 threads, its memory cut to the byte; then the tests of the kernels
(tests/test_cpu_*.py, or what is named) run with the checked extension. Whatever is found ends the run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import nanobind
import pytest
from kernel_cases import ROOT, build, command, tools

BUILD = ROOT / "build" / "sanitizers"
# With -O3 the checked kernels take a quarter of an hour to compile.
OPTIMISATION = "-O1"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
MODULE = "plait.kernels.cpu._native"


def run_cases() -> None:
    program = BUILD / "kernel_cases"
    for isa in command([program]).split():
        for threads in ("1", "2"):
            with tempfile.TemporaryDirectory() as directory:
                said = command([program, isa, threads, Path(directory) / "record"])
            print(f"{isa}, threads: {threads}, cases and hash: {said.strip()}", flush=True)


def run_tests(arguments: list[str]) -> int:
    """In a process of its own, whose memory the sanitizers watch from its start."""
    libraries = (f"lib{name}.so" for name in ("asan", "ubsan", "stdc++"))
    # Leaks: Python itself leaves objects behind when it ends.
    environment = {
        **tools(),
        "LD_PRELOAD": " ".join(command(["c++", f"-print-file-name={name}"]).strip() for name in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    inside = [sys.executable, __file__, "--inside", *arguments]
    return subprocess.run(inside, cwd=ROOT, env=environment).returncode


def load_extension() -> None:
    """Puts the checked extension where plait will import its own."""
    (path,) = BUILD.glob("_native.*.so")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[MODULE] = module


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--inside"]:
        load_extension()
        return int(pytest.main(["--timeout", "3600", *arguments[1:]]))
    python = (f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}")
    build(BUILD, f"-DCMAKE_CXX_FLAGS={FLAGS}", f"-DPLAIT_OPTIMISATION={OPTIMISATION}", *python)
    run_cases()
    return run_tests(arguments or sorted(map(str, (ROOT / "tests").glob("test_cpu_*.py"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
