"""Matrix products with weights, which are kept in packed panels at their own width.

A panel holds sixteen output rows, ``[K][16]``; each number of the result is one chain of fused multiply-adds
over k in float32, so a row has the same bits whatever rows are beside it (``csrc/linear_kernels.hpp``).
Activations are float32. Native code checks nothing, so what it is given is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.kernels.backend import Packed
from plait.kernels.cpu.mixers import MixerOps
from plait.kernels.cpu.native import native

WEIGHT_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class PackedMatrix:
    """A linear layer or a table of rows, [outputs, inputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.panels, number = _pack([weight])
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        address = 0 if self.bias is None else self.bias.data_ptr()
        self.native: Any = native.Matrix(number, self.outputs, self.inputs, self.panels.data_ptr(), address)
        self.nbytes = self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shared(self) -> PackedMatrix:
        """The same panels under another name, which count once."""
        twin = object.__new__(PackedMatrix)
        twin.__dict__.update(self.__dict__)
        twin.nbytes = 0
        return twin


class PackedExperts:
    """The two matrices of E experts: the panels of one expert behind those of the one before."""

    def __init__(self, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> None:
        self.count = len(gate_up)
        self.nbytes = 0
        self.outputs: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        self.native: dict[str, Any] = {}
        self._panels: list[torch.Tensor] = []
        for which, weights in (("gate_up", gate_up), ("down", down)):
            outputs, inputs = weights[0].shape
            panels, number = _pack(weights)
            self.outputs[which], self.inputs[which] = outputs, inputs
            self.native[which] = native.Matrix(number, outputs, inputs, panels.data_ptr(), 0)
            self._panels.append(panels)
            self.nbytes += panels.nbytes


def _pack(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Panels of matrices of one shape and dtype, one behind the other, and the number of their format."""
    first = weights[0]
    if any(w.shape != first.shape or w.dtype != first.dtype or w.dim() != 2 for w in weights):
        raise ValueError("weights that are packed together must be matrices of one shape and dtype")
    if first.dtype not in WEIGHT_FORMATS:
        names = ", ".join(str(dtype) for dtype in WEIGHT_FORMATS)
        raise ValueError(f"weights of {first.dtype} cannot be packed; one of {names} can")
    outputs, inputs = first.shape
    number: int = native.FORMATS[WEIGHT_FORMATS[first.dtype]]
    size: int = native.matrix_bytes(number, outputs, inputs)
    panels = torch.empty(len(weights) * size, dtype=torch.uint8)
    for i, weight in enumerate(weights):
        rows = weight.contiguous()
        native.pack(number, outputs, inputs, number, rows.data_ptr(), panels.data_ptr() + i * size)
    return panels, number


def _matrix(packed: Packed) -> PackedMatrix:
    if not isinstance(packed, PackedMatrix):
        raise TypeError(f"{type(packed).__name__} was not packed by the cpu backend")
    return packed


def _rows(x: torch.Tensor, inputs: int) -> torch.Tensor:
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"activations must be float32 [T, {inputs}], not {x.dtype} {list(x.shape)}")
    return x.contiguous()


class LinearOps(MixerOps):
    """The part of the CPU backend that multiplies with weights."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        return PackedMatrix(weight, bias)

    def pack_embedding(self, weight: torch.Tensor) -> Packed:
        return PackedMatrix(weight)

    def tied_head(self, embedding: Packed) -> Packed:
        return _matrix(embedding).shared()

    def pack_experts(self, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> Packed:
        return PackedExperts(gate_up, down)

    def linear(
        self, x: torch.Tensor, packed: Packed, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        weight = _matrix(packed)
        if out_dtype not in (None, torch.float32):
            raise ValueError(f"the cpu backend gives float32, not {out_dtype}")
        x = _rows(x, weight.inputs)
        y = torch.empty((x.shape[0], weight.outputs))
        native.linear(weight.native, x.data_ptr(), x.shape[0], y.data_ptr(), weight.outputs)
        return y

    def embedding(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        table = _matrix(packed)
        ids = token_ids.contiguous()
        y = torch.empty((ids.shape[0], table.inputs))
        native.embedding(table.native, ids.data_ptr(), ids.shape[0], y.data_ptr())
        return y

    def expert_linear(
        self,
        x: torch.Tensor,
        experts: Packed,
        which: str,
        starts: torch.Tensor,
        sources: torch.Tensor | None,
    ) -> torch.Tensor:
        if not isinstance(experts, PackedExperts):
            raise TypeError(f"{type(experts).__name__} was not packed by the cpu backend")
        x = _rows(x, experts.inputs[which])
        visits = x.shape[0] if sources is None else sources.shape[0]
        y = torch.empty((visits, experts.outputs[which]))
        native.experts(
            experts.native[which],
            experts.count,
            starts.data_ptr(),
            0 if sources is None else sources.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
        )
        return y
