"""Linear layers to measure: every format of weights, with few rows and many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from plait.bench.cases import Case
from plait.kernels.backend import Backend, Packed, Rows
from plait.models.config import DTYPES, ModelConfig

ROWS = (1, 4, 16, 64, 512)
"""Decodes of few and of many requests, and chunks of prompts."""
COLD_BYTES = 128 * 2**20
"""Copies of weights are used in turn until they make up this much, so that none is found in a cache: in a
model, a layer's weights are long evicted when it comes again."""

Pack = Callable[[], Packed]


def linear_cases(backend: Backend, config: ModelConfig) -> Iterator[Case]:
    """One projection (hidden to MLP width) per weight format and number of rows."""
    inputs, outputs = config.hidden_size, config.intermediate_size or config.hidden_size
    for name, dtype, pack in weight_formats(backend, torch.randn(outputs, inputs)):
        first = pack()
        count = max(1, COLD_BYTES // max(1, first.nbytes))
        turn = itertools.cycle([first, *(pack() for _ in range(count - 1))])
        for rows in ROWS:
            x = torch.randn(rows, inputs).to(dtype)
            moved = first.nbytes + rows * (inputs + outputs) * dtype.itemsize
            operations = 2.0 * rows * inputs * outputs
            case = f"{name} {inputs}x{outputs} M={rows}"
            call = partial(_next_linear, backend, x, turn)
            yield Case("linear", case, call, moved, operations, operations, "GFLOP")


def _next_linear(backend: Backend, x: torch.Tensor, weights: Iterator[Packed]) -> torch.Tensor:
    return backend.linear(x, next(weights))


def weight_formats(backend: Backend, weight: torch.Tensor) -> Iterator[tuple[str, torch.dtype, Pack]]:
    """(name, dtype of activations, how to pack ``weight``) of each format that the backend knows."""
    for name, dtype in DTYPES.items():
        activations = dtype if backend.activation_dtype is None else backend.activation_dtype
        if backend.supports(dtype=activations) is None:
            yield name, activations, partial(backend.pack_linear, weight.to(dtype))
    if backend.activation_dtype is None:
        return
    for name in backend.quantisations:
        yield name, backend.activation_dtype, partial(backend.quantised(name).pack_linear, weight)
    for name in backend.block_formats:
        rows = Rows(_blocks(name, weight), name, weight.shape[1])
        yield name, backend.activation_dtype, partial(backend.pack_rows, [rows])


def _blocks(name: str, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` in one of GGUF's formats: uint8 [rows, bytes of a row]."""
    from gguf import GGMLQuantizationType, quantize

    return torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[name.upper()]))
