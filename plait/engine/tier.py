"""The prefix cache's folder: from the settings to a tier."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from plait import __version__
from plait.config import ConfigError
from plait.core.plan import Kind
from plait.engine.memory import in_words, parse_bytes
from plait.engine.resolve import Decision, Resolved
from plait.models.fingerprint import weights_fingerprint
from plait.worker.arena import Arena
from plait.worker.disk_tier import DiskTier
from plait.worker.unit_files import UnitFiles

MOST = 16 * 2**30
"""Largest limit of the folder that is chosen by itself."""
SHARE = 0.5
"""Part of the disk's free space that the folder takes at most when no limit is set."""
LEAST_PAGES = 16
"""Pages beside a snapshot that a limit must leave room for."""


def open_tier(resolved: Resolved, arena: Arena) -> tuple[DiskTier | None, list[Decision]]:
    """The tier that the settings ask for (None: none), and what to say about it.

    Raises:
        ConfigError: the folder cannot be used, or its limit holds nothing.
    """
    asked = resolved.args.prefix_cache_dir
    if asked is None:
        return None, []
    folder = Path(asked).expanduser()
    about = namespace_text(resolved)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = UnitFiles(
            folder,
            _short(about),
            page_size=arena.geometry.page_size,
            sizes=(arena.geometry.page_bytes, arena.geometry.state_bytes),
            about=about,
        )
        why = _set_limit(resolved, files)
    except OSError as fault:
        raise ConfigError(
            f"prefix_cache_dir={asked!r} cannot be used: {fault.strerror or fault}; choose a folder that can "
            "be written"
        ) from fault
    value = f"{folder}, at most {in_words(files.limit)}"
    reason = ", ".join(filter(None, (why, str(files.found))))
    return DiskTier(arena, files), [Decision("prefix cache on disk", value, reason)]


def namespace(resolved: Resolved) -> bytes:
    """A short name for all that the bytes of a page or a state depend on, besides the tokens.

    All weights are read for it.
    """
    return _short(namespace_text(resolved))


def _short(about: str) -> bytes:
    return hashlib.blake2b(about.encode(), digest_size=16).digest()


def namespace_text(resolved: Resolved) -> str:
    """All that the bytes of a page or a state depend on, besides the tokens."""
    layout = resolved.layout
    if resolved.args.load_format == "dummy":
        weights = f"random, seed {resolved.args.seed or 0}"
    else:
        weights = weights_fingerprint(resolved.path)
    return "\n".join(
        (
            f"plait {__version__}",
            f"numerics {resolved.numerics_id}",
            f"weights {weights}",
            f"pages of {layout.page_size} tokens, {layout.page_bytes} bytes",
            f"states of {layout.state_bytes} bytes",
            f"model {resolved.config!r}",
        )
    )


def _set_limit(resolved: Resolved, files: UnitFiles) -> str:
    """The folder's limit; why it is that."""
    if resolved.args.prefix_cache_dir_limit is None:
        free = shutil.disk_usage(files.folder).free + files.total
        files.limit = min(MOST, int(free * SHARE))
        return f"{in_words(free)} are free there"
    files.limit = parse_bytes(resolved.args.prefix_cache_dir_limit)
    if files.total > files.limit:
        files.trim()
    least = LEAST_PAGES * files.file_bytes(Kind.PAGE) + files.file_bytes(Kind.STATE)
    if files.limit < least:
        raise ConfigError(
            f"prefix_cache_dir_limit={files.limit}: a snapshot and {LEAST_PAGES} pages take "
            f"{in_words(least)}; set it to {least} or more"
        )
    return ""
