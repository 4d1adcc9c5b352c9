"""Reads the weights of a checkpoint, and checks every one of them.

``Weights`` is what layers read from: it knows the prefix it stands at, checks shapes, packs for the
backend, and in the end says which tensors nobody asked for. Tensors come from a ``WeightSource``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from plait.kernels.backend import Backend, Packed, Rows
from plait.kernels.layout import PLAIN_DTYPES
from plait.models.sources import DummySource, WeightError, WeightSource

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""

Reorder = Callable[[torch.Tensor], torch.Tensor]
"""Sorts the rows of a matrix [rows, anything]."""

SKIPPED_PREFIXES = ("mtp.", "model.mtp.", "model.visual.", "visual.")
"""Parts of a checkpoint that a text model does not use: multi-token prediction and vision."""

_NESTED_PREFIX = "model.language_model."
"""How multimodal checkpoints call what text-only ones call ``model.``."""

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry though they follow from the config."""


class _Ledger:
    """What all scopes of one load share."""

    def __init__(
        self,
        source: WeightSource | DummySource,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self.source = source
        self.backend = backend
        self.dtype = dtype
        self.weight_dtype = None if backend.keeps_weight_dtype else dtype
        self.device = device
        self.progress = progress
        self.skipped: list[str] = []
        self.names: dict[str, str] = {}
        self.taken: set[str] = set()
        self.nbytes = 0
        for name in source.names():
            if name.startswith(SKIPPED_PREFIXES) or name.endswith(_IGNORED_SUFFIXES):
                self.skipped.append(name)
                continue
            plain = _canonical(name)
            if plain in self.names:
                raise WeightError(f"tensors {self.names[plain]} and {name} are both {plain}; one must go")
            self.names[plain] = name


def _canonical(name: str) -> str:
    return "model." + name.removeprefix(_NESTED_PREFIX) if name.startswith(_NESTED_PREFIX) else name


class Weights:
    """Reads a checkpoint from one prefix on.

    Args:
        source: where tensors come from.
        backend: packs them.
        dtype: of the model's activations; of its weights too, unless the backend keeps the checkpoint's.
        device: where they shall live.
        progress: called as tensors are read.
    """

    def __init__(
        self,
        source: WeightSource | DummySource,
        backend: Backend,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        self._ledger = _Ledger(source, backend, dtype, torch.device(device), progress)
        self._prefix = ""

    def under(self, part: str) -> Weights:
        """The same reader, one or more levels further in."""
        scope = object.__new__(Weights)
        scope._ledger, scope._prefix = self._ledger, f"{self._prefix}{part}."
        return scope

    @property
    def backend(self) -> Backend:
        return self._ledger.backend

    @property
    def nbytes(self) -> int:
        """Resident bytes of what was handed out so far."""
        return self._ledger.nbytes

    @property
    def skipped(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that a text model does not use."""
        return tuple(self._ledger.skipped)

    def has(self, name: str) -> bool:
        """Whether the checkpoint stores this tensor (random weights store any)."""
        ledger = self._ledger
        return isinstance(ledger.source, DummySource) or self._prefix + name in ledger.names

    def raw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as the model computes with it: in the model's dtype, on its device.

        Raises:
            WeightError: it is missing or has another shape.
        """
        return self._read(name, shape).to(self._ledger.device, self._ledger.dtype)

    def matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as the backend packs it: in the checkpoint's dtype where it keeps that, else as ``raw``.

        Raises:
            WeightError: as ``raw``.
        """
        return self._read(name, shape).to(self._ledger.device, self._ledger.weight_dtype)

    def rows(
        self, name: str, outputs: int, inputs: int, *, reorder: Reorder | None = None, exact: bool = False
    ) -> Rows:
        """Rows of a linear layer or a table, as quantised blocks where file and backend have those.

        Raises:
            WeightError: as ``raw``.
        """
        blocks = self._read_blocks(name, (outputs, inputs))
        if blocks is None:
            rows = Rows(self.matrix(name, (outputs, inputs)), exact=exact)
        else:
            rows = Rows(blocks[1].to(self._ledger.device), blocks[0], inputs, exact)
        return rows if reorder is None else replace(rows, data=reorder(rows.data))

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A small float32 vector (norm weights, biases of the recurrence), kept beside the packed weights."""
        value = self._read(name, (size,)).to(self._ledger.device, torch.float32)
        self._ledger.nbytes += value.nbytes
        return value

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that a layer keeps unpacked."""
        self._ledger.nbytes += tensor.nbytes
        return tensor

    def pack(self, parts: Sequence[Rows], bias: torch.Tensor | None = None) -> Packed:
        """Pack a linear layer, its rows in parts, and count its bytes."""
        return self.count(self.backend.pack_rows(parts, bias))

    def count(self, packed: Packed) -> Packed:
        self._ledger.nbytes += packed.nbytes
        return packed

    def fused(self, parts: dict[str, int], inputs: int, *, bias: bool = False) -> Packed:
        """Several linear layers over the same input as one: ``parts`` maps each name to its output rows."""
        weights = [self.rows(f"{name}.weight", rows, inputs) for name, rows in parts.items()]
        if not bias:
            return self.pack(weights)
        biases = [self.raw(f"{name}.bias", (rows,)) for name, rows in parts.items()]
        return self.pack(weights, torch.cat(biases))

    def linear(
        self, name: str, outputs: int, inputs: int, *, bias: bool = False, exact: bool = False
    ) -> Packed:
        """One linear layer; ``exact``: never quantised."""
        weight = self.rows(f"{name}.weight", outputs, inputs, exact=exact)
        return self.pack([weight], self.raw(f"{name}.bias", (outputs,)) if bias else None)

    def finish(self, *, tied: bool) -> None:
        """Check that every tensor was asked for. A tied head that the checkpoint stores again is no error.

        Raises:
            WeightError: naming the tensors that are left.
        """
        ledger = self._ledger
        left = sorted(set(ledger.names) - ledger.taken - ({"lm_head.weight"} if tied else set()))
        if left:
            shown = ", ".join(ledger.names[name] for name in left[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise WeightError(
                f"the checkpoint holds {len(left)} tensors that this model does not know: {shown}{more}; "
                "config.json and weights may belong to different models"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        ledger, full = self._ledger, self._prefix + name
        if isinstance(ledger.source, DummySource):
            tensor = ledger.source.draw(full, shape)
            return tensor.to(ledger.source.dtype) if ledger.backend.keeps_weight_dtype else tensor
        tensor = ledger.source.get(self._stored(ledger.source, name, shape))
        if tensor.dtype not in PLAIN_DTYPES:
            raise WeightError(
                f"tensor {ledger.names[full]} is {tensor.dtype}: quantised weights are not built yet"
            )
        self._take(full)
        return tensor

    def _read_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor] | None:
        """(format, rows of blocks), where the file holds such and the backend packs them as they are."""
        ledger = self._ledger
        if isinstance(ledger.source, DummySource) or not ledger.backend.block_formats:
            return None
        blocks = ledger.source.blocks(self._stored(ledger.source, name, shape), ledger.backend.block_formats)
        if blocks is not None:
            self._take(self._prefix + name)
        return blocks

    def _stored(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> str:
        """The checkpoint's name of a tensor, whose shape is checked."""
        ledger, full = self._ledger, self._prefix + name
        if full not in ledger.names:
            raise WeightError(
                f"the checkpoint has no tensor {full} (shape {list(shape)}) among its {len(ledger.names)}: "
                "config.json and weights may belong to different models, or a shard is missing"
            )
        stored = ledger.names[full]
        found = tuple(source.shape(stored))
        if found != shape:
            raise WeightError(f"tensor {stored} has shape {list(found)}; config.json asks for {list(shape)}")
        return stored

    def _take(self, full: str) -> None:
        ledger = self._ledger
        ledger.taken.add(full)
        if ledger.progress:
            ledger.progress(len(ledger.taken), len(ledger.names))
