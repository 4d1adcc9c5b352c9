"""A model of plait-tiny's kind whose weights are random, and far from where training begins."""

from __future__ import annotations

import torch

from tools.train_tiny.model import Shape, TinyLM


@torch.no_grad()
def wild_model(shape: Shape, seed: int = 6) -> TinyLM:
    """Every part of it matters, and answers vary: embeddings are small beside what layers add, since a tied
    head must not repeat its input."""
    model = TinyLM(shape)
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name or "A_log" in name or "dt_bias" in name:
            weight += 0.3 * torch.randn(weight.shape, generator=random)
        elif "embed" in name:
            weight.normal_(0, 0.1, generator=random)
        elif "conv1d" in name:
            weight.normal_(0, 0.6, generator=random)
        else:
            weight.normal_(0, 1.5 * weight.shape[1] ** -0.5, generator=random)
    return model.eval()
