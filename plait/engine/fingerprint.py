"""A name for a model's weights, so that engines exchange memory only where it means the same to both."""

from __future__ import annotations

import hashlib
from pathlib import Path

from plait.engine.resolve import Resolved

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024


def weights_fingerprint(resolved: Resolved) -> str:
    """Hex digest of the model's config and its weights: each file's size, beginning, end, samples between.

    Reading all bytes would take as long as loading them; files that agree in so many places, and are not
    equal, do not come about by training.
    """
    digest = hashlib.blake2b(repr(resolved.config).encode(), digest_size=16)
    if resolved.args.load_format == "dummy":
        digest.update(f"random {resolved.args.seed or 0}".encode())
        return digest.hexdigest()
    path = resolved.path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        _add_file(digest, file)
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size};".encode())
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb") as file:
        for offset in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
