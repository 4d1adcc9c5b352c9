"""The CPU backend: C++ kernels that are row-invariant, with float32 activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.kernels.cpu.decoder import CpuDecoder
from plait.kernels.cpu.linear import LinearOps
from plait.kernels.cpu.mixers import MixerOps
from plait.kernels.cpu.native import MISSING, isa, native
from plait.kernels.cpu.packing import QUANTISATIONS
from plait.kernels.decoder import LayerParams, NormParams
from plait.kernels.registry import register


class CpuBackend(LinearOps, MixerOps):
    """Weights keep the checkpoint's width, or are quantised; activations and sums are float32."""

    name = "cpu"
    version = "1"
    row_invariant = True
    state_grid = 1
    priority = 10
    activation_dtype = torch.float32
    quantisations = tuple(QUANTISATIONS)

    def unavailable(self, device: str) -> str | None:
        try:
            kind = torch.device(device).type
        except RuntimeError:
            return f"{device!r} is not a torch device"
        return f"it runs on the CPU, not on {kind!r}" if kind != "cpu" else MISSING

    def supports(
        self,
        *,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        page_size: int | None = None,
    ) -> str | None:
        if dtype not in (None, torch.float32):
            asked = str(dtype).removeprefix("torch.")
            return (
                f"activations are float32 in backend {self.name!r}, not {asked}; use auto or float32 "
                "(weights keep the width they have in the checkpoint)"
            )
        return self.supports_cache(kv_dtype, state_dtype, page_size)

    def quantised(self, name: str) -> CpuBackend:
        if name not in self.quantisations:
            known = ", ".join(self.quantisations)
            raise ValueError(f"{name!r} is not built yet in backend {self.name!r}; there are {known}")
        return CpuBackend(name)

    def decoder(self, layers: Sequence[LayerParams], norm: NormParams) -> CpuDecoder:
        return CpuDecoder(layers, norm)

    def describe(self) -> str:
        return f"instruction set {isa()}"

    def set_threads(self, count: int) -> None:
        # What is left to torch is small; a second set of threads would only take the processor from ours.
        torch.set_num_threads(1)
        native.set_threads(count)


register(CpuBackend())
