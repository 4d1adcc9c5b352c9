"""Where weights come from: safetensors files, or a random draw."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from plait.models.config import ModelConfig


class WeightError(ValueError):
    """A checkpoint's weights are not what the model needs; the message names the tensor or the file."""


class WeightSource(Protocol):
    """Tensors by the names of Hugging Face checkpoints."""

    def names(self) -> Iterable[str]:
        """Every tensor there is."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in the checkpoint's dtype; it may be mapped from a file: never write to it."""
        ...

    def nbytes(self, name: str, formats: Collection[str] = ()) -> int:
        """Bytes of what ``blocks``, or else ``get``, would give, without reading it."""
        ...

    def blocks(self, name: str, formats: Collection[str]) -> tuple[str, torch.Tensor] | None:
        """A matrix as the quantised blocks it is stored in: (format, uint8 [rows, bytes of a row]).

        None where it is not stored in blocks of one of ``formats`` (GGUF's names in lower case).
        """
        ...


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """A folder with ``model.safetensors``, or with shards and their ``model.safetensors.index.json``.

    Headers are read and checked at once; tensors are mapped from the files when asked for.

    Raises:
        WeightError: there are no such files, a shard is missing, or a file is damaged; names the file and,
            where the header tells, the first tensor that is cut off.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._open: dict[Path, Any] = {}
        index = self.folder / INDEX
        if index.exists():
            self._read_index(index)
        elif (self.folder / SINGLE).exists():
            self._add_file(self.folder / SINGLE)
        else:
            others = sorted(path.name for path in self.folder.glob("*.bin"))
            hint = f"; it holds {', '.join(others[:3])}, which must be converted" if others else ""
            raise WeightError(f"{self.folder} holds neither {SINGLE} nor {INDEX}{hint}")

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def nbytes(self, name: str, formats: Collection[str] = ()) -> int:
        return self._sizes[name]

    def blocks(self, name: str, formats: Collection[str]) -> None:
        return None

    def get(self, name: str) -> torch.Tensor:
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._open[path].get_tensor(name)
            return tensor
        except SafetensorError as error:
            raise WeightError(f"{path}: tensor {name} cannot be read: {error}") from error

    def _read_index(self, index: Path) -> None:
        try:
            mapping = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(f"{index} is no index of shards: {error!r}; download it again") from error
        for shard in sorted(set(mapping.values())):
            path = self.folder / shard
            if not path.exists():
                raise WeightError(f"shard {shard} named by {index} is missing; download it again")
            self._add_file(path)
        for name, shard in mapping.items():
            if self._files.get(name) != self.folder / shard:
                raise WeightError(f"{index} promises tensor {name} in {shard}, which does not hold it")

    def _add_file(self, path: Path) -> None:
        for name, entry in _read_header(path).items():
            if name in self._files:
                raise WeightError(f"tensor {name} is in both {self._files[name].name} and {path.name}")
            self._files[name] = path
            self._shapes[name] = tuple(entry["shape"])
            start, end = entry["data_offsets"]
            self._sizes[name] = end - start


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: name -> dtype, shape, data_offsets.

    The format: 8 bytes, little endian, the header's length; the header, JSON; the data. Offsets count from
    the data's start.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightError(f"{path} is cut off inside its header ({size} bytes); download it again")
        try:
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"][1])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightError(f"{path} is no safetensors file: its header is broken: {error!r}") from error
    for name, entry in entries:
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise WeightError(
                f"{path} is cut off: tensor {name} ends at byte {end:,}, the file at {size:,}; "
                "download it again"
            )
    return header


class DummySource:
    """Random weights for whatever a model asks for: the same for the same seed, name and shape.

    They are scaled so that activations neither vanish nor explode: norms near 1, linear layers with
    variance 1 / inputs, decay rates spread as at the start of training.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.dtype = config.dtype
        self._plus_one = config.norm_plus_one
        self._seed = seed

    def names(self) -> Iterable[str]:
        return ()

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """float32 of ``shape``, by a generator seeded with the name."""
        # torch's CPU generator reads 32 bits of its seed: name and seed must both go into those.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if name.endswith("A_log"):
            return torch.empty(shape).uniform_(0.01, 16, generator=generator).log_()
        if name.endswith("dt_bias"):
            return torch.ones(shape)
        value = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            gated = name.endswith("linear_attn.norm.weight")
            return value * 0.1 + (0.0 if self._plus_one and not gated else 1.0)
        if name.endswith(".bias"):
            return value * 0.1
        return value / math.sqrt(shape[-1])
