"""All decoder layers of a model as one operation, for backends that have such a one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.kernels.backend import AttentionParams, DeltaParams, Packed
from plait.kernels.batch import Batch
from plait.kernels.layout import CacheViews


@dataclass(frozen=True, slots=True)
class NormParams:
    """An RMS norm: ``weight`` float32 [H], and what is added to the mean square."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerParams:
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)).

    Args:
        input_norm, post_norm: before the mixer, and before the feed-forward.
        in_proj, out_proj: packed linears around the mixer; ``in_proj`` gives ``mixer.splits``.
        mixer: attention or Gated DeltaNet.
        index: which layer of that kind in the cache it is.
        feed_forward: [T, H] -> [T, H].
        mlp: (gate_up, down), packed, where ``feed_forward`` is ``Backend.mlp`` with these; else None.
    """

    input_norm: NormParams
    in_proj: Packed
    mixer: AttentionParams | DeltaParams
    index: int
    out_proj: Packed
    post_norm: NormParams
    feed_forward: Callable[[torch.Tensor], torch.Tensor]
    mlp: tuple[Packed, Packed] | None


class Decoder(Protocol):
    """Runs all layers and the norm behind them; the bits are those of the single operations."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Spent so far in "gemm", "attention" and "recurrence", apart from ``LayerParams.feed_forward``."""
        ...

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, caches: CacheViews, batch: Batch
    ) -> torch.Tensor:
        """Reads and advances the cache.

        Args:
            x: [T, H], the embedded tokens; its memory may be used.
            cos, sin: float32 [T, R], of the rows' positions.
            caches: the same in every step, or it takes a little longer.
            batch: of T tokens.

        Returns:
            The norm of the sum of all outputs, [T, H].
        """
        ...
