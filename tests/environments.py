"""Python environments of their own, for clients that are not to share this one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def environment(*packages: str, with_ours: bool = False) -> Path:
    """The folder of an environment's commands; made once, kept in the user's cache.

    Args:
        packages: what to install, as pip takes it.
        with_ours: what this environment has is there, too, and not installed again: torch is not fetched.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "plait" / "test-clients"
    key = hashlib.sha256(" ".join([sys.version, *packages]).encode()).hexdigest()[:16]
    folder = cache / f"python-{key}"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
        if with_ours:
            ours, own = (
                sysconfig.get_paths()["purelib"],
                f"lib/python{sys.version_info[0]}.{sys.version_info[1]}",
            )
            (folder / own / "site-packages" / "zz_ours.pth").write_text(ours + "\n")
        command = [str(folder / "bin" / "pip"), "install", "--quiet", *packages]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if ended.returncode:
            pytest.skip(f"pip could not install {' '.join(packages)}: {ended.stderr[-500:]}")
        (folder / "made").touch()
    return folder / "bin"
