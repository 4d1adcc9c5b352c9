"""Reads the weights of a checkpoint, and checks every one of them.

``Weights`` is what layers read from: it knows the prefix it stands at, checks shapes, packs for the
backend, and in the end says which tensors nobody asked for. Tensors come from a ``WeightSource``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.kernels.backend import Backend, Packed
from plait.kernels.layout import PLAIN_DTYPES
from plait.models.sources import DummySource, WeightError, WeightSource

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""

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
        dtype: of the model's weights and activations.
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

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A small float32 vector (norm weights, biases of the recurrence), kept beside the packed weights."""
        value = self._read(name, (size,)).to(self._ledger.device, torch.float32)
        self._ledger.nbytes += value.nbytes
        return value

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that a layer keeps unpacked."""
        self._ledger.nbytes += tensor.nbytes
        return tensor

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        """Pack a linear layer and count its bytes."""
        return self.count(self.backend.pack_linear(weight, bias))

    def count(self, packed: Packed) -> Packed:
        self._ledger.nbytes += packed.nbytes
        return packed

    def fused(self, parts: dict[str, int], inputs: int, *, bias: bool = False) -> Packed:
        """Several linear layers over the same input as one: ``parts`` maps each name to its output rows."""
        weight = torch.cat([self.raw(f"{name}.weight", (rows, inputs)) for name, rows in parts.items()])
        if not bias:
            return self.pack(weight)
        biases = [self.raw(f"{name}.bias", (rows,)) for name, rows in parts.items()]
        return self.pack(weight, torch.cat(biases))

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Packed:
        """One linear layer."""
        weight = self.raw(f"{name}.weight", (outputs, inputs))
        return self.pack(weight, self.raw(f"{name}.bias", (outputs,)) if bias else None)

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
            return ledger.source.draw(full, shape)
        if full not in ledger.names:
            raise WeightError(
                f"the checkpoint has no tensor {full} (shape {list(shape)}) among its {len(ledger.names)}: "
                "config.json and weights may belong to different models, or a shard is missing"
            )
        stored = ledger.names[full]
        found = tuple(ledger.source.shape(stored))
        if found != shape:
            raise WeightError(f"tensor {stored} has shape {list(found)}; config.json asks for {list(shape)}")
        tensor = ledger.source.get(stored)
        if tensor.dtype not in PLAIN_DTYPES:
            raise WeightError(f"tensor {stored} is {tensor.dtype}: quantised weights are not built yet")
        ledger.taken.add(full)
        if ledger.progress:
            ledger.progress(len(ledger.taken), len(ledger.names))
        return tensor
