"""A language model: embedding, layers, norm, head. Families differ in their layers alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from plait.kernels.batch import Batch
from plait.kernels.layout import CacheLayout, CacheViews
from plait.models.config import ModelConfig
from plait.models.layers import DecoderLayer, RMSNorm, Step
from plait.models.rotary import RotaryTable
from plait.models.weights import Weights

LayerMaker = Callable[[ModelConfig, int, Weights], DecoderLayer]
"""Makes layer ``index`` from the weights under its own prefix."""


class CausalLM:
    """A loaded model.

    Attributes:
        config: what it is.
        layout: how its cache is laid out.
        backend: its kernels.
        dtype, device: of its weights and activations.
        weight_bytes: resident bytes of its weights.
        skipped: tensors of the checkpoint that a text model does not use.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        make_layer: LayerMaker,
        layout: CacheLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.layout = config, layout
        self.dtype, self.device = dtype, device
        self.backend = weights.backend
        model = weights.under("model")
        table = model.rows("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = weights.count(self.backend.pack_table(table))
        self._layers = [
            make_layer(config, index, model.under(f"layers.{index}")) for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(
            model, "norm", config.hidden_size, config.rms_norm_eps, plus_one=config.norm_plus_one
        )
        self._decoder = self.backend.decoder([layer.params for layer in self._layers], self._norm.params)
        if config.tie_word_embeddings:
            self._head = self.backend.tied_head(self._embedding)
        else:
            self._head = weights.linear("lm_head", config.vocab_size, config.hidden_size)
        weights.finish(tied=config.tie_word_embeddings)
        self._rotary = RotaryTable(config.rope, device)
        self.weight_bytes = weights.nbytes
        self.skipped = weights.skipped

    @torch.no_grad()
    def forward(self, batch: Batch, caches: CacheViews) -> torch.Tensor:
        """One step: reads and advances the cache.

        Args:
            batch: the tokens, T of them, and where their pages and states lie.
            caches: views made with this model's ``layout``.

        Returns:
            Logits, float32 [R, vocabulary], of the rows in ``batch.logit_rows``.
        """
        lengths = (last - first for first, last in pairwise(batch.query_start_host))
        end = max(context + new for context, new in zip(batch.context_lens_host, lengths, strict=True))
        step = Step(batch, caches, *self._rotary.rows(batch.positions, end))
        x = self.backend.embedding(batch.token_ids, self._embedding)
        wanted, x = batch.logit_rows, self._decode(x, step)
        if wanted.numel() == 0:
            return torch.empty((0, self.config.vocab_size), device=self.device)
        if wanted.numel() != x.shape[0]:  # they rise: as many as there are rows are all of them
            x = x[wanted]
        return self.backend.linear(x, self._head, out_dtype=torch.float32)

    def _decode(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """All layers and the norm behind them, in one operation where the backend has such a one."""
        if self._decoder is not None:
            return self._decoder(x, step.cos, step.sin, step.caches, step.batch)
        residual: torch.Tensor | None = None
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        assert residual is not None
        return self._norm.add(x, residual)[0]
