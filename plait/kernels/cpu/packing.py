"""Weights in the forms that the CPU kernels read: panels of 16 outputs (``csrc/panels.hpp``).

========  ================================  ===========================================  ===============
format    weights                           activations they are multiplied with         bytes a weight
========  ================================  ===========================================  ===============
f32       float32                           float32                                      4
bf16      bfloat16                          float32                                      2
f16       float16                           float32                                      2
int8      8 bits, a scale per output        12 bits and a sign, a scale per row          1
q8_0      GGUF's: 8 bits, a scale per 32    12 bits and a sign, a scale per row          1.06
q4_0      GGUF's: 4 bits, a scale per 32    8 bits, a scale per row and 32 inputs        0.56
q4_1      q4_0 and a minimum per 32         8 bits, a scale per row and 32 inputs        0.62
========  ================================  ===========================================  ===============

Sums are float32, in one chain over the inputs, or integers. Activations are quantised as they come, by their
own row alone, so a row's result depends on nothing but the row::

    int8 weight:  scale = A / 127, q = nearest(w / scale)           A the largest |w| of the output
    q4_1 weight:  q = nearest((w - minimum) / scale), cut to 0 .. 15; scale and minimum, both float16, of the
                  least squared error that a few steps find (``csrc/quantise.hpp``)
    activation:   scale = A / 2047 or A / 127, q = nearest(x * 2047 / A) or nearest(x * 127 / A)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.kernels.backend import Packed, Rows
from plait.kernels.cpu.memory import weights_memory
from plait.kernels.cpu.native import native

FORMAT_OF = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Formats that hold weights as they are."""

QUANTISATIONS = {"int8": "int8", "int4": "q4_1"}
"""What weights can be brought into when they are loaded -> the format that is."""

BYTES = {"int8": 1.0, "int4": 0.625}
"""Of a weight in these, scales included."""

BLOCKS = ("q8_0", "q4_0", "q4_1")
"""Formats of files that are kept as they are."""


class Matrix:
    """Weights of one format [outputs, inputs], packed, and what native code needs of them.

    Args:
        format: one of those above.
        panels: uint8, ``native.matrix_bytes`` of them.
        bias: float32 [outputs], or None.
    """

    __slots__ = ("_panels", "bias", "format", "inputs", "native", "outputs")

    def __init__(
        self, format: str, outputs: int, inputs: int, panels: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        assert panels.data_ptr() % 64 == 0
        self.format, self.outputs, self.inputs = format, outputs, inputs
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._panels = panels  # held here, since native code has the address alone
        address = 0 if self.bias is None else self.bias.data_ptr()
        self.native: Any = native.Matrix(native.FORMATS[format], outputs, inputs, panels.data_ptr(), address)

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: matrices whose outputs follow each other.

    Args:
        parts: the matrices.
        shared: the memory is counted elsewhere.
    """

    parts: tuple[Matrix, ...]
    shared: bool = False

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def nbytes(self) -> int:
        return 0 if self.shared else sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Experts:
    """``count`` experts of equal shape, their panels one after another; the matrices describe the first."""

    count: int
    gate_up: Matrix
    down: Matrix

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def pack_linear(
    parts: Sequence[Rows], bias: torch.Tensor | None = None, *, quantisation: str | None = None
) -> Linear:
    """Rows of one layer, in order. Neighbours of one format become one matrix.

    Args:
        parts: rows with the same inputs; blocks keep their format, plain numbers theirs unless quantised.
        bias: [outputs], or None.
        quantisation: format for plain numbers that are not marked exact.
    """
    matrices: list[Matrix] = []
    first = 0
    for format, data, inputs in _merge(parts, quantisation):
        outputs = data.shape[0]
        own_bias = None if bias is None else bias[first : first + outputs]
        panels = weights_memory.allocate(native.matrix_bytes(native.FORMATS[format], outputs, inputs))
        _fill(panels, format, data, inputs)
        matrices.append(Matrix(format, outputs, inputs, panels, own_bias))
        first += outputs
    return Linear(tuple(matrices))


def pack_experts(
    gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor], *, quantisation: str | None = None
) -> Experts:
    """See ``Backend.pack_experts``."""
    return Experts(len(gate_up), _pack_stack(gate_up, quantisation), _pack_stack(down, quantisation))


def tied(embedding: Packed) -> Linear:
    """The head that shares the memory of a table."""
    assert isinstance(embedding, Linear), f"{type(embedding).__name__} was packed by another backend"
    return Linear(embedding.parts, shared=True)


def _pack_stack(experts: Sequence[torch.Tensor], quantisation: str | None) -> Matrix:
    outputs, inputs = experts[0].shape
    format = _format(Rows(experts[0]), quantisation)
    size = native.matrix_bytes(native.FORMATS[format], outputs, inputs)
    panels = weights_memory.allocate(len(experts) * size)
    for index, weight in enumerate(experts):
        _fill(panels[index * size : (index + 1) * size], format, weight, inputs)
    return Matrix(format, outputs, inputs, panels)


def _format(rows: Rows, quantisation: str | None) -> str:
    if rows.format is not None:
        return rows.format
    if quantisation is not None and not rows.exact:
        return QUANTISATIONS[quantisation]
    return FORMAT_OF.get(rows.data.dtype, "f32")


def _merge(parts: Sequence[Rows], quantisation: str | None) -> list[tuple[str, torch.Tensor, int]]:
    """(format, data, inputs) of each run of parts that can be one matrix."""
    runs: list[tuple[str, torch.Tensor, int]] = []
    for rows in parts:
        format = _format(rows, quantisation)
        if runs and runs[-1][0] == format and runs[-1][1].dtype == rows.data.dtype:
            runs[-1] = (format, torch.cat((runs[-1][1], rows.data)), rows.inputs)
        else:
            runs.append((format, rows.data, rows.inputs))
    return runs


def _fill(panels: torch.Tensor, format: str, data: torch.Tensor, inputs: int) -> None:
    """Pack rows into panels. Raises ValueError for weights that are not finite and shall be quantised."""
    number, outputs = native.FORMATS[format], data.shape[0]
    if data.dtype == torch.uint8:
        native.repack(number, outputs, inputs, data.contiguous().data_ptr(), panels.data_ptr())
        return
    if data.dtype not in FORMAT_OF:
        data = data.to(torch.float32)
    data = data.contiguous()
    kind = native.FORMATS[FORMAT_OF[data.dtype]]
    native.pack(number, outputs, inputs, kind, data.data_ptr(), panels.data_ptr())
