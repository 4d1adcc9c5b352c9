"""The header of a GGUF file: its metadata and where its tensors lie.

Layout, version 2 and 3, little endian (github.com/ggml-org/ggml, docs/gguf.md)::

    "GGUF" | version u32 | tensor count u64 | pair count u64
    pairs:   key | type u32 | value                     (a string is its length u64, then UTF-8)
    tensors: name | dimensions u32 | sizes u64[] (innermost first) | type u32 | offset u64
    padding to general.alignment
    data:    each tensor at its offset from here

The ``gguf`` package has a reader too; it takes seconds for a large vocabulary, since it makes an array object
of every string, and reads past the end of a cut file without notice. Here every read is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


class GgufError(ValueError):
    """A GGUF file that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """sizes, outermost first (the file has them innermost first)"""
    type_id: int
    """GGML type number"""
    offset: int
    """bytes from the start of the file"""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Any]
    """key to int, float, bool, str, or a list of these"""
    tensors: Mapping[str, TensorEntry]


def read_header(path: str | Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        GgufError: no such file, not GGUF, another version, or cut or corrupt within the header. Whether the
            tensors' data is complete is checked where their types are known (``plait.models.gguf``).
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return _Reader(path, data).header()
    except FileNotFoundError as fault:
        raise GgufError(f"{path} does not exist") from fault
    except (OSError, ValueError) as fault:
        if isinstance(fault, GgufError):
            raise
        reason = "it is empty" if path.is_file() and path.stat().st_size == 0 else str(fault)
        raise GgufError(f"{path} cannot be read: {reason}") from fault


class _Reader:
    def __init__(self, path: Path, data: mmap) -> None:
        self._path = path
        self._data = data
        self._at = 4

    def _fail(self, what: str) -> GgufError:
        return GgufError(f"{self._path} is damaged: {what}; fetch it again")

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise GgufError(
                f"{self._path} is no GGUF file: it begins with {self._data[:4]!r} and not b'GGUF'"
            )
        self._read_version()
        tensor_count, pair_count = self._unpack("QQ", "the counts of tensors and metadata")
        metadata: dict[str, Any] = {}
        for i in range(pair_count):
            key = self._string(f"metadata key {i + 1} of {pair_count}")
            if key in metadata:
                raise self._fail(f"the metadata key {key!r} comes twice")
            (kind,) = self._unpack("I", f"the type of {key!r}")
            metadata[key] = self._value(kind, key)
        entries = [self._entry(i, tensor_count) for i in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fail(f"general.alignment is {alignment!r} and must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self._fail(f"the tensor {name!r} comes twice")
            if offset % alignment:
                raise self._fail(f"the tensor {name!r} lies at offset {offset}, no multiple of {alignment}")
            tensors[name] = TensorEntry(name, shape, type_id, start + offset)
        return GgufHeader(self._path, metadata, tensors)

    def _read_version(self) -> None:
        (version,) = self._unpack("I", "the version")
        if version & 0xFFFF == 0 and version:
            raise GgufError(
                f"{self._path} is a big-endian GGUF file; only little-endian ones are read. "
                "Convert it with gguf-convert-endian, or fetch a little-endian file"
            )
        if version not in (2, 3):
            raise GgufError(f"{self._path} is a GGUF file of version {version}; versions 2 and 3 are read")

    def _take(self, size: int, what: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._fail(f"it ends after {len(self._data):,} bytes, within {what}")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}"), what))

    def _string(self, what: str) -> str:
        (size,) = self._unpack("Q", what)
        try:
            return self._take(size, what).decode("utf-8")
        except UnicodeDecodeError as fault:
            raise self._fail(f"{what} is not UTF-8 text") from fault

    def _value(self, kind: int, key: str) -> Any:
        what = f"the value of {key!r}"
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._fail(f"{what} has the unknown type {kind}")
        return self._unpack(_SCALARS[kind], what)[0]

    def _array(self, key: str) -> list[Any]:
        what = f"the values of {key!r}"
        kind, count = self._unpack("IQ", what)
        if kind in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[kind]}")
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size, what)))
        if kind != _STRING:
            raise self._fail(f"{what} have the unknown type {kind}")
        # Each string takes 8 bytes or more, so a wild count ends at the end of the file and not in memory.
        return [self._string(what) for _ in range(count)]

    def _entry(self, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"the name of tensor {index + 1} of {count}")
        what = f"the description of tensor {name!r}"
        (dimensions,) = self._unpack("I", what)
        if dimensions > _MAX_DIMENSIONS:
            raise self._fail(f"tensor {name!r} has {dimensions} dimensions; at most {_MAX_DIMENSIONS} exist")
        sizes = self._unpack(f"{dimensions}Q", what)
        type_id, offset = self._unpack("IQ", what)
        return name, tuple(reversed(sizes)), type_id, offset
