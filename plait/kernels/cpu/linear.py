"""Matrix products with weights, and rows of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from plait.kernels.backend import Backend, Packed, Rows
from plait.kernels.cpu import packing
from plait.kernels.cpu.native import native


class LinearOps(Backend):
    """The part of the CPU backend that multiplies with weights.

    Args:
        quantisation: format that plain weights are brought into when they are packed; None: they keep theirs.
    """

    keeps_weight_dtype = True

    def __init__(self, quantisation: str | None = None) -> None:
        self.quantisation = quantisation
        # Who asks for a format gets that one, also for a file whose own could be kept.
        self.block_formats = () if quantisation else packing.BLOCKS

    def packed_bytes(self, shape: tuple[int, ...], nbytes: int) -> int:
        if self.quantisation is None or len(shape) < 2:
            return nbytes
        return int(math.prod(shape) * packing.BYTES[self.quantisation])

    # Weights

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        return self.pack_rows([Rows(weight)], bias)

    def pack_rows(self, parts: Sequence[Rows], bias: torch.Tensor | None = None) -> Packed:
        return packing.pack_linear(parts, bias, quantisation=self.quantisation)

    def pack_embedding(self, weight: torch.Tensor) -> Packed:
        return self.pack_table(Rows(weight))

    def pack_table(self, rows: Rows) -> Packed:
        # 8 bits at least: the head reads this table too, and its errors go straight into the logits.
        return packing.pack_linear([rows], quantisation="int8" if self.quantisation else None)

    def tied_head(self, embedding: Packed) -> Packed:
        return packing.tied(embedding)

    def pack_experts(self, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> Packed:
        return packing.pack_experts(gate_up, down, quantisation=self.quantisation)

    # Operations

    def linear(
        self, x: torch.Tensor, packed: Packed, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        layer = _own(packed)
        rows, outputs = x.shape[0], layer.outputs
        x = _floats(x, layer.inputs)
        y = torch.empty((rows, outputs))
        to, address = y.data_ptr(), x.data_ptr()
        for part in layer.parts:
            native.linear(part.native, address, rows, to, outputs)
            to += 4 * part.outputs
        return y if out_dtype is None else y.to(out_dtype)

    def embedding(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        (table,) = _own(packed).parts
        ids = token_ids.to(torch.int64).contiguous()
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
        assert isinstance(experts, packing.Experts), f"{type(experts).__name__} was packed by another backend"
        first = experts.gate_up if which == "gate_up" else experts.down
        x = _floats(x, first.inputs)
        assert starts.shape == (experts.count + 1,)
        _check_indices(starts)
        visits = x.shape[0]
        if sources is not None:
            _check_indices(sources)
            visits = sources.shape[0]
        y = torch.empty((visits, first.outputs))
        rows = 0 if sources is None else sources.data_ptr()
        native.experts(first.native, experts.count, starts.data_ptr(), rows, x.data_ptr(), y.data_ptr())
        return y


def _own(packed: Packed) -> packing.Linear:
    assert isinstance(packed, packing.Linear), f"{type(packed).__name__} was packed by another backend"
    return packed


def _floats(x: torch.Tensor, inputs: int) -> torch.Tensor:
    """``x`` as native code reads it: float32 [rows, inputs], rows one after another."""
    assert x.dtype == torch.float32, f"activations are {x.dtype}, not float32"
    assert x.shape[1:] == (inputs,), f"activations are {list(x.shape)}, not [rows, {inputs}]"
    return x.contiguous()


def _check_indices(indices: torch.Tensor) -> None:
    assert indices.dtype == torch.int64
    assert indices.is_contiguous()
