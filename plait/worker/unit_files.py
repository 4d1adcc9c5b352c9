"""A folder of pages and snapshots: one file per unit, which several engines may share.

::

    FOLDER/<namespace>/<key>.page    a page          FOLDER/<namespace>/about.txt   what the namespace is
    FOLDER/<namespace>/<key>.state   a snapshot      .../<key>.<kind>.<n>.part      being written

    file     | header | tokens of the page (uint32) | payload | checksum of all before it (XXH3, 128 bits) |

A namespace names everything that the bytes depend on (numerics id, weights, layout), a key all tokens up to
the unit's end. So a file, once there, never changes; it appears whole, by a rename; it is believed only if
its header is the one that was to be expected and its checksum is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from plait.core.plan import Kind
from plait.core.snapshots import SnapshotKind
from plait.core.tier import Item, Name

MAGIC = b"plaitkv1"
HEADER = struct.Struct("<8s16s16s16sIIQBB6x")
"""magic, namespace, key, parent's key, depth, tokens, payload bytes, kind, why the snapshot was taken"""
CHECKSUM_BYTES = 16
TRIM_TO = 7 / 8
"""What is left of the limit after the oldest files went."""
REFRESH_SECONDS = 5.0
"""Between looks at what other engines have added."""

SETTLED_NS = 2 * 10**9
"""A modification time that is as old as this has seen all changes up to it."""

_SUFFIX = {Kind.PAGE: "page", Kind.STATE: "state"}
_KIND = {suffix: kind for kind, suffix in _SUFFIX.items()}
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_UNIT = re.compile(r"([0-9a-f]{32})\.(page|state)")
_PART = re.compile(r"[0-9a-f]{32}\.(page|state)\.\d+-\d+\.part")
ABOUT = "about.txt"


class DamagedError(ValueError):
    """A file is not what its name says."""


@dataclass(slots=True)
class Found:
    """What was in the folder at start."""

    units: int = 0
    bytes: int = 0
    """of this namespace"""
    half_written: int = 0
    """left by engines that were killed; removed"""
    foreign: int = 0
    """of another size than this namespace's units, or another name; left alone"""

    def __str__(self) -> str:
        text = f"{self.units:,} units kept from before"
        if self.half_written:
            text += f"; {self.half_written} half-written removed"
        if self.foreign:
            text += f"; {self.foreign} foreign or damaged ignored"
        return text


class UnitFiles:
    """Units of one namespace in a folder, bounded over all namespaces.

    Methods that touch files belong to one thread each: ``read`` to one, the rest to another; ``units`` may be
    looked at by any.

    Args:
        folder: made if need be, for this user alone.
        namespace: 16 bytes; names all that the units' bytes depend on.
        page_size: tokens of a page.
        sizes: bytes of a page's and a state's payload.
        limit: most bytes that all files in ``folder`` may take. Several engines may exceed it by what they
            write between two looks.
        about: said in the namespace's folder, for people.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        namespace: bytes,
        *,
        page_size: int,
        sizes: tuple[int, int],
        limit: int = 0,
        about: str = "",
    ) -> None:
        self.folder = folder
        self.namespace = namespace
        self.limit = limit
        self._page_size = page_size
        self._sizes = sizes
        self._numbers = itertools.count()
        self._home = folder / namespace.hex()
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.units: dict[Name, None] = {}
        """what is there, as far as known"""
        self.total = 0
        """bytes of all namespaces when last counted, and what was written since"""
        self._listed = (0, 0.0)
        """the namespace's modification time when it was last listed, and when to look again"""
        self.found = self.look()
        if not (self._home / ABOUT).exists():
            self._write_about(about)

    def _write_about(self, text: str) -> None:
        with contextlib.suppress(OSError):
            (self._home / ABOUT).write_text(text + "\n", encoding="utf-8")

    # -- looking ----------------------------------------------------------------------------

    def file_bytes(self, kind: Kind) -> int:
        return HEADER.size + 4 * self._page_size + self._sizes[kind] + CHECKSUM_BYTES

    def _path(self, name: Name) -> Path:
        kind, key = name
        return self._home / f"{key.hex()}.{_SUFFIX[kind]}"

    def look(self) -> Found:
        """List the namespace and count the folder; remove what engines that were killed left behind."""
        found = Found()
        changed, began = os.stat(self._home).st_mtime_ns, time.monotonic()
        units: dict[Name, None] = {}
        for entry in os.scandir(self._home):
            if (match := _UNIT.fullmatch(entry.name)) is not None:
                kind = _KIND[match[2]]
                if _size(entry) == self.file_bytes(kind):
                    units[(kind, bytes.fromhex(match[1]))] = None
                    found.bytes += self.file_bytes(kind)
                else:
                    found.foreign += 1
            elif _PART.fullmatch(entry.name):
                found.half_written += self._remove_if_dead(entry.path)
            elif entry.name != ABOUT:
                found.foreign += 1
        found.units = len(units)
        self.units = units
        self.total = sum(size for _, size, _ in self._all_files())
        if time.time_ns() - changed < SETTLED_NS:
            changed = 0  # what comes within the same tick of the file system's clock would not show
        now = time.monotonic()
        self._listed = (changed, now + max(REFRESH_SECONDS, 100 * (now - began)))  # a large folder less often
        return found

    @staticmethod
    def _remove_if_dead(path: str) -> bool:
        """Whoever writes a file holds a lock on it, which ends with the process."""
        try:
            part = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            return True
        except OSError:
            return False
        finally:
            os.close(part)

    def refresh(self) -> None:
        """Look for what other engines have added, now and then."""
        changed, due = self._listed
        if time.monotonic() < due:
            return
        if os.stat(self._home).st_mtime_ns != changed:
            self.look()
        else:
            self._listed = (changed, time.monotonic() + REFRESH_SECONDS)

    def has(self, name: Name) -> bool:
        return name in self.units

    # -- one unit ---------------------------------------------------------------------------

    def _header(self, item: Item, reason: int) -> bytes:
        fixed = HEADER.pack(
            MAGIC, self.namespace, item.key, item.parent.ljust(16, b"\0"), item.depth,
            len(item.tokens) // 4, self._sizes[item.kind], item.kind, reason,
        )  # fmt: skip
        return fixed + item.tokens

    def write(self, item: Item, payload: memoryview, still_wanted: Callable[[], bool] = lambda: True) -> None:
        """Add a unit; the oldest go first where there is no room.

        Args:
            payload: its bytes.
            still_wanted: asked once they are written, before the file appears.

        Raises:
            OSError: the system refuses; nothing is left behind.
        """
        if self.total + self.file_bytes(item.kind) > self.limit:
            self.trim(self.file_bytes(item.kind))
        path = self._path(item.name)
        part = f"{path}.{os.getpid()}-{next(self._numbers)}.part"
        header = self._header(item, item.reason)
        file = self._create(part)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            checksum = xxhash.xxh3_128(header)
            checksum.update(payload)
            for piece in (memoryview(header), payload, memoryview(checksum.digest())):
                _write_all(file, piece)
            if still_wanted():
                os.rename(part, path)
                self.units[item.name] = None
                self.total += self.file_bytes(item.kind)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)  # if it is still there
            os.close(file)

    def _create(self, part: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(part, flags, 0o600)
        except FileNotFoundError:  # somebody has removed the folder
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(part, flags, 0o600)

    def read(self, item: Item, payload: memoryview) -> SnapshotKind:
        """Fill ``payload`` with the unit; why the snapshot was taken.

        Raises:
            FileNotFoundError: it is not there any more.
            DamagedError: the file is not this unit, whole and unchanged. It is removed.
            OSError: it cannot be read.
        """
        path = self._path(item.name)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            self.units.pop(item.name, None)
            raise
        try:
            reason = self._verify(file, item, payload)
        except (DamagedError, OSError) as fault:
            self.units.pop(item.name, None)
            if isinstance(fault, DamagedError):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise DamagedError(f"{path.name}: {fault}") from None
            raise
        finally:
            os.close(file)
        return reason

    def _verify(self, file: int, item: Item, payload: memoryview) -> SnapshotKind:
        header = bytearray(HEADER.size + len(item.tokens))
        checksum = bytearray(CHECKSUM_BYTES)
        for piece in (memoryview(header), payload, memoryview(checksum)):
            if not _read_all(file, piece):
                raise DamagedError("it is cut off")
        reason = HEADER.unpack_from(header)[-1]
        if header != self._header(item, reason):
            raise DamagedError("it holds something else than its name says")
        found = xxhash.xxh3_128(header)
        found.update(payload)
        if found.digest() != checksum or reason not in SnapshotKind.__members__.values():
            raise DamagedError("its checksum is wrong")
        return SnapshotKind(reason)

    def touch(self, units: list[tuple[Name, int]]) -> None:
        """Units, with their depths, that are used now. The deeper ones count as older: they are worth nothing
        without the others, and go first."""
        now = time.time_ns()
        for name, depth in units:
            with contextlib.suppress(OSError):  # gone, or another user's
                os.utime(self._path(name), ns=(now - depth * 1000, now - depth * 1000))

    # -- the bound --------------------------------------------------------------------------

    def trim(self, room: int = 0) -> None:
        """Remove what was used least recently, of any namespace, until there is room again."""
        target = min(self.limit * TRIM_TO, self.limit - room)
        files = sorted(self._all_files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
            if path.parent == self._home and (match := _UNIT.fullmatch(path.name)) is not None:
                self.units.pop((_KIND[match[2]], bytes.fromhex(match[1])), None)
        self.total = total

    def _all_files(self) -> Iterator[tuple[int, int, Path]]:
        """(when it was used, bytes, path) of every unit in the folder, whoever wrote it or is writing it."""
        for home in os.scandir(self.folder):
            if not (_NAMESPACE.fullmatch(home.name) and home.is_dir(follow_symlinks=False)):
                continue
            for entry in os.scandir(home):
                if _UNIT.fullmatch(entry.name) or _PART.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, status.st_size, Path(entry.path)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return -1


def _write_all(file: int, piece: memoryview) -> None:
    while piece:
        count = os.write(file, piece)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        piece = piece[count:]


def _read_all(file: int, piece: memoryview) -> bool:
    """False at the end of the file."""
    while piece:
        count = os.readv(file, [piece])
        if count == 0:
            return False
        piece = piece[count:]
    return True
