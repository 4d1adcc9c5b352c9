"""From the name of a model to its files: a path, a built-in name, or an id on the Hugging Face hub."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from plait.models.builtin import (
    BUILT_INS,
    ModelNotFoundError,
    Progress,
    built_in_names,
    cache_dir,
    pull_built_in,
    shipped_models,
)

__all__ = ["BUILT_INS", "ModelNotFoundError", "Progress", "cache_dir", "pull", "resolve_model"]

HUB_SECONDS = 10.0
"""How long the hub may take to say whether it has a model."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[\w./-]+\.gguf))?", re.ASCII)
_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

T = TypeVar("T")


def resolve_model(
    name: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The model folder, or the GGUF file, that ``name`` stands for; it is downloaded if need be.

    Args:
        name: a folder or .gguf file; a built-in short name; or ``organisation/model`` on the hub, with
            ``:file.gguf`` behind it where a repository holds several GGUF files.
        revision: branch, tag or commit on the hub.
        download_dir: where downloads go; by default the caches of plait and of huggingface_hub.
        progress: called with (what, bytes so far, bytes in all or 0).

    Raises:
        ModelNotFoundError: nothing is there; the message says what was tried and what to do.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if _looks_like_path(name):
        raise ModelNotFoundError(_no_such_path(path))
    return pull(name, revision, download_dir, progress)


def pull(
    name: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a built-in model or one from the hub, unless it is there already. As ``resolve_model``."""
    if name in (shipped := shipped_models()):
        return shipped[name]
    if name in BUILT_INS:
        built_in = BUILT_INS[name]
        try:
            return pull_built_in(built_in, download_dir, progress)
        except ModelNotFoundError as fault:
            try:
                return _from_hub(built_in.hub_id, None, None, download_dir, progress)
            except ModelNotFoundError as second:
                raise ModelNotFoundError(f"{fault}. Then the hub was tried: {second}") from fault
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise ModelNotFoundError(_no_such_name(name))
    return _from_hub(match["repo"], match["file"], revision, download_dir, progress)


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is no model: give a model folder, or a file that ends in .gguf")
        return path
    files = sorted(f for f in path.glob("*.gguf") if f.is_file())
    # A folder with an adapter alone is let through: reading its config says what is wrong with it.
    has_config = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if has_config and (not files or any(path.glob("*.safetensors"))):
        return path
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelNotFoundError(
            f"{path} holds several GGUF files; name one: {', '.join(f.name for f in files)}"
        )
    raise ModelNotFoundError(f"{path} is no model folder: it has neither a config.json nor a .gguf file")


def _looks_like_path(name: str) -> bool:
    if _HUB_ID.fullmatch(name) and name.split("/")[0] not in (".", ".."):
        return False
    return "/" in name or "\\" in name or name.startswith((".", "~")) or name.endswith(".gguf")


def _no_such_path(path: Path) -> str:
    path = path.absolute()
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    nearest = ""
    if parent == path.parent and parent.is_dir():
        close = difflib.get_close_matches(path.name, [p.name for p in parent.iterdir()], n=1)
        nearest = f"; did you mean {parent / close[0]}?" if close else ""
    return f"there is no file or folder {path} (what exists is {parent}){nearest or '; check the spelling'}"


def _no_such_name(name: str) -> str:
    close = difflib.get_close_matches(name, built_in_names(), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"{name!r} is no model: there is no such file or folder, the built-in models are "
        f"{', '.join(built_in_names())}, and hub ids have the form organisation/model{hint}"
    )


def _from_hub(
    repo: str,
    file: str | None,
    revision: str | None,
    download_dir: str | Path | None,
    progress: Progress | None,
) -> Path:
    where: dict[str, Any] = {"repo_id": repo, "revision": revision}
    if download_dir is not None:
        where["cache_dir"] = download_dir
    try:
        info = _within(
            HUB_SECONDS, lambda: HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS / 2)
        )
    except (RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError) as fault:
        raise ModelNotFoundError(_refused(repo, revision, fault)) from fault
    except Exception as fault:  # whatever the network and its libraries raise
        return _from_hub_cache(where, file, fault)
    names = [sibling.rfilename for sibling in info.siblings or []]
    patterns = [file] if file else _wanted(repo, names)
    if file and file not in names:
        raise ModelNotFoundError(f"{repo} on the hub has no {file}; it has {_listed(names)}")
    try:
        folder = snapshot_download(**where, allow_patterns=patterns, tqdm_class=_bar(repo, progress))
    except Exception as fault:
        raise ModelNotFoundError(
            f"the download of {repo} from the hub stopped ({_brief(fault)}); run it again to go on from there"
        ) from fault
    return Path(folder, file) if file else _local(Path(folder))


def _from_hub_cache(where: dict[str, Any], file: str | None, fault: Exception) -> Path:
    """What an earlier download left, when the hub cannot be reached."""
    try:
        patterns = [file] if file else None
        folder = Path(snapshot_download(**where, allow_patterns=patterns, local_files_only=True))
        path = folder / file if file else _local(folder)
        if path.exists():
            return path
    except (OSError, ModelNotFoundError):
        pass
    raise ModelNotFoundError(
        f"{where['repo_id']} was looked for as a file or folder, among earlier downloads, and on the hub, "
        f"which cannot be reached ({_brief(fault)}). Connect to the network, or copy the model's files here "
        f"and give their folder; built-in models are {', '.join(built_in_names())}"
    ) from fault


def _wanted(repo: str, names: list[str]) -> list[str]:
    """Which files of a repository to fetch: safetensors with what belongs to them, or its one GGUF file."""
    if any(name.endswith(".safetensors") for name in names):
        return list(_FILES)
    files = [name for name in names if name.endswith(".gguf")]
    if len(files) == 1:
        return files
    if files:
        whole = [name for name in files if not _PART.search(name)]
        raise ModelNotFoundError(
            f"{repo} on the hub holds several GGUF files; name one, as in {repo}:{(whole or files)[0]}. "
            f"There are {_listed(files)}"
        )
    raise ModelNotFoundError(
        f"{repo} on the hub has neither safetensors nor GGUF files; it has {_listed(names)}"
    )


def _refused(repo: str, revision: str | None, fault: Exception) -> str:
    if isinstance(fault, GatedRepoError):
        return f"{repo} on the hub is gated: accept its terms there, then log in with `hf auth login`"
    if isinstance(fault, RevisionNotFoundError):
        return f"{repo} on the hub has no revision {revision!r}; leave it out for the newest"
    close = difflib.get_close_matches(repo.split("/")[1].lower(), built_in_names(), n=1)
    hint = f" A built-in model is {close[0]}." if close else ""
    return (
        f"there is no file or folder {repo}, and no such model on the hub; check the spelling, and for a "
        f"private model log in with `hf auth login`.{hint}"
    )


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call ``function``, but wait no longer: name servers can keep a caller for minutes, whatever timeout it
    asks for."""
    results: list[T] = []
    faults: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as fault:  # handed to the caller below
            faults.append(fault)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    if not results:
        raise TimeoutError(f"no reply within {seconds:g} s")
    return results[0]


def _bar(repo: str, progress: Progress | None) -> type[tqdm] | None:
    """A progress bar that shows nothing and reports bytes to ``progress``; None for the library's own."""
    if progress is None:
        return None

    report = progress

    class Bar(tqdm):
        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B":
                report(repo, int(self.n), int(self.total or 0))

    return Bar


def _brief(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0][:200]}" if lines else type(fault).__name__


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "no files"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
