"""The flat batch of one step, as tensors: what models and kernels see."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Tokens of many requests laid end to end.

    ``T`` tokens of ``B`` chunks. Integer tensors are on the model's device; the tuples are the same
    numbers on the host, so that a kernel can loop without asking the device.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]: absolute position of each token in its request"""
    query_start: torch.Tensor
    """int32 [B + 1]: chunk ``b`` is rows ``query_start[b] : query_start[b + 1]``"""
    context_lens: torch.Tensor
    """int32 [B]: tokens of the request already in the cache before this step"""
    page_table: torch.Tensor
    """int32 [B, P]: arena page of each ``page_size`` positions; unused entries hold 0 and are not read"""
    slots: torch.Tensor
    """int32 [B]: state unit of each chunk (0 and not read without recurrent layers)"""
    query_start_host: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    slots_host: tuple[int, ...]
    exports: tuple[tuple[int, int, int], ...]
    """(chunk index, tokens of the chunk that precede the export, target state unit), ordered by chunk then
    by tokens; 1 <= tokens <= chunk length"""
    logit_rows: torch.Tensor
    """int64 [R]: rows of T whose logits are wanted, ascending"""

    @property
    def num_chunks(self) -> int:
        return len(self.context_lens_host)
