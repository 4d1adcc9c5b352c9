"""What a wheel of plait holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as on a machine without a compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--config-settings=wheel.cmake=false", f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run(command, check=True)
    [path] = folder.glob("plait-*.whl")
    return zipfile.ZipFile(path)


def test_everything_in_the_package_is_in_the_wheel(wheel: zipfile.ZipFile):
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "plait").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert ours <= set(wheel.namelist())


def test_the_model_that_comes_along_is_whole(wheel: zipfile.ZipFile):
    folder = "plait/models/shipped/plait-tiny"
    for file in (ROOT / folder).iterdir():
        assert wheel.read(f"{folder}/{file.name}") == file.read_bytes()
