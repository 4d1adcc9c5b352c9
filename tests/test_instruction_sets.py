"""Every instruction set gives the same bits: this processor's, and another architecture's under an emulator.

The program of tests/native runs all kernels without Python: linear layers and experts in every weight format,
attention in every cache format, Gated DeltaNet with snapshots, norms, rotary, routing and sampling, many of
them over ragged chunks and over numbers that are not finite. It checks by itself that other ways to the same
numbers (other chunks, pages and calls) bring the same bits.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import (
    AARCH64,
    AARCH64_COMPILER,
    Records,
    build_cases,
    command,
    differences,
    lacking,
    read,
)

EMULATOR = "qemu-aarch64"


@functools.cache
def native_program() -> Path:
    if missing := lacking("cmake", "c++"):
        pytest.skip(f"{missing} is not installed")
    return build_cases("native")


@functools.cache
def aarch64_program() -> Path:
    if missing := lacking("cmake", AARCH64_COMPILER, EMULATOR):
        pytest.skip(f"{missing} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    return build_cases("aarch64", *AARCH64)


def record(isa: str, threads: int, *program: str | Path, to: Path) -> Records:
    said = command([*program, isa, str(threads), to])
    found = read(to)
    assert len(found) == int(said.split()[0])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Of this processor's best instruction set, on one thread."""
    program = native_program()
    isa = command([program]).split()[0]
    return record(isa, 1, program, to=tmp_path_factory.mktemp("cases") / isa)


@pytest.mark.slow
def test_the_cases_say_something(expected: Records) -> None:
    """Outputs are numbers, and hardly one is like another, unless their names say otherwise."""
    kinds = {name.split("/")[0] for name in expected}
    assert kinds == {
        "linear", "pack", "experts", "attention", "delta", "conv", "norm", "silu", "rotary", "sampling",
    }  # fmt: skip
    for name, numbers in expected.items():
        if numbers.dtype.kind != "f" or "anything" in name or name.startswith("pack/"):
            continue
        if any(word in name for word in ("not-finite", "limits", "scales")):
            continue
        assert np.isfinite(numbers).all(), name
        if numbers.size > 100 and "embedding" not in name:
            assert len(np.unique(numbers)) > numbers.size / 3, name


@pytest.mark.slow
def test_this_processors_instruction_sets(expected: Records, tmp_path: Path) -> None:
    program = native_program()
    for isa in command([program]).split():
        for threads in (1, 2):
            ours = record(isa, threads, program, to=tmp_path / "x")
            assert differences(ours, expected) == [], (isa, threads)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", ["neon", "baseline"])
def test_aarch64(isa: str, expected: Records, tmp_path: Path) -> None:
    """Under an emulator, which follows IEEE 754 as the processor does."""
    ours = record(isa, 2, EMULATOR, aarch64_program(), to=tmp_path / isa)
    assert differences(ours, expected) == []


@pytest.mark.slow
def test_aarch64_uses_neon() -> None:
    assert command([EMULATOR, aarch64_program()]).split() == ["neon", "baseline"]


@pytest.mark.slow
def test_unknown_instruction_sets_are_refused(tmp_path: Path) -> None:
    done = subprocess.run([native_program(), "mmx", "1", tmp_path / "x"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "'mmx' is unknown" in done.stderr


def test_one_bit_is_a_difference() -> None:
    ours = {"a": np.array([1, -0.0, np.nan], np.float32), "b": np.arange(3)}
    assert differences(ours, {name: numbers.copy() for name, numbers in ours.items()}) == []
    assert differences(ours, {**ours, "a": np.array([1, 0.0, np.nan], np.float32)}) == [
        "a: 1 of 3, first [1]: -0.0 against 0.0"
    ]
    assert differences(ours, {"a": ours["a"]}) == ["b: not in both"]
    assert differences(ours, {**ours, "b": np.arange(4)}) == ["b: int64 (3,) against int64 (4,)"]
