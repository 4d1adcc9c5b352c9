"""Which weights a model has: a checksum of all of them, so that nothing computed with others is mistaken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import xxhash

_CHUNK = 8 * 2**20


def weights_fingerprint(path: Path) -> str:
    """A checksum (XXH3, 128 bits, in hex) of a GGUF file, or of a folder's config and safetensors.

    It reads every byte, about as fast as the disk gives them; loading them afterwards finds them in memory.

    Raises:
        OSError: a file cannot be read.
    """
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    for part in _files(path):
        whole.update(f"{part.name} {part.stat().st_size}\n".encode())
        with part.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                whole.update(buffer[:count])
    return whole.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if (path / "config.json").exists():
        yield path / "config.json"
    yield from sorted(path.glob("*.safetensors"))
