"""The CPU backend: C++ kernels, row-invariant, chosen by the processor's instruction set."""

from __future__ import annotations

import torch

from plait.kernels.cpu.linear import LinearOps
from plait.kernels.cpu.native import MISSING, native
from plait.kernels.registry import register


class CpuBackend(LinearOps):
    """Float32 activations; weights at their own width; chunks may end anywhere."""

    name = "cpu"
    version = "1"
    row_invariant = True
    state_grid = 1
    priority = 10
    keeps_weight_dtype = True

    def unavailable(self, device: str) -> str | None:
        if torch.device(device).type != "cpu":
            return "it runs on CPUs"
        return MISSING

    def supports(
        self,
        *,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        page_size: int | None = None,
    ) -> str | None:
        if dtype is not None and dtype != torch.float32:
            name = str(dtype).removeprefix("torch.")
            return f"activations of {name} are not built for CPUs; use float32 (weights keep their own width)"
        return self.supports_cache(kv_dtype, state_dtype, page_size)

    def set_threads(self, count: int) -> None:
        super().set_threads(1)  # what torch still does is small: its threads would only wait for one another
        native.set_threads(count)


register(CpuBackend())
