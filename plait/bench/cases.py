"""Kernels to measure, with the bytes they must move and the operations they must do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from plait.core.plan import Admission, Chunk
from plait.core.sampling_params import SamplingParams
from plait.kernels.backend import Backend
from plait.kernels.batch import Batch
from plait.kernels.layout import QUANTISED_DTYPES, CacheViews, RecurrentCache
from plait.models.config import DTYPES, ModelConfig
from plait.worker.batching import build_batch
from plait.worker.request import RequestState
from plait.worker.sampler import Row, sample

PAGE = 16
WIDTH = 4
"""Bytes of a float32 activation."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Args:
        moved: bytes that must come from or go to memory; 0 where data stay in cache: no ceiling then.
        operations: floating-point operations, a multiply-add being two.
        amount, unit: what one call does, such as 64 tokens; the rate is amount / seconds, for
            bytes ("GB") and operations ("GFLOP") in 1e9.
    """

    kernel: str
    case: str
    call: Callable[[], Any]
    moved: float
    operations: float
    amount: float
    unit: str


class _Cache:
    """An arena of one model for ``requests`` requests of ``length`` tokens, filled with random numbers."""

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        requests: int,
        length: int,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        layout = config.cache_layout(PAGE, dtype=torch.float32, kv_dtype=kv_dtype)
        one = layout.geometry(0, backend.state_grid)
        slabs = requests * one.slabs_for(length) + (requests + 1 if one.has_state else 0)
        geometry = layout.geometry(slabs * one.slab_bytes, backend.state_grid)
        arena = torch.zeros(slabs * one.slab_bytes + 64, dtype=torch.uint8)
        arena = arena[-arena.data_ptr() % 64 :]
        self.views = CacheViews(arena, layout, geometry)
        self.geometry = geometry
        for cache in self.views.attention:
            for entries, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
                if scales is None:
                    entries.normal_()
                else:
                    entries.copy_((torch.rand(entries.shape) * 200 - 100).to(entries.dtype))
                    scales.fill_(0.01)

    def batch(self, lengths: Sequence[tuple[int, int]], vocab_size: int) -> Batch:
        """One chunk for each (context, new tokens)."""
        g = self.geometry
        chunks, first = [], 0
        for number, (context, new) in enumerate(lengths):
            pages = tuple(range(first, first + g.pages_for(context + new)))
            first += len(pages)
            slot = g.num_states - 1 - number if g.has_state else None
            chunks.append(Chunk(str(number), (0,) * new, context, pages, slot))
        wanted: list[list[int]] = [[] for _ in chunks]
        return build_batch(
            chunks, wanted, num_pages=g.num_pages, vocab_size=vocab_size, device=torch.device("cpu")
        )


def attention_cases(
    backend: Backend, config: ModelConfig, contexts: Sequence[int] = (512, 4096)
) -> Iterator[Case]:
    """Decodes over a context (bytes of keys and values bind), and whole prompts (operations bind).

    A decode reads 2 · context · kv heads · D entries. A query at position p does 4 · heads · D · (p + 1)
    operations; a prompt of T tokens 2 · heads · D · T · (T + 1).
    """
    for kv_dtype in (*DTYPES.values(), *QUANTISED_DTYPES):
        if backend.supports(kv_dtype=kv_dtype) is None:
            yield from _attention_cases(backend, config, contexts, kv_dtype)


def _attention_cases(
    backend: Backend, config: ModelConfig, contexts: Sequence[int], kv_dtype: torch.dtype
) -> Iterator[Case]:
    a, kind = config.attention, str(kv_dtype).removeprefix("torch.")
    for context, requests in ((contexts[-1], 1), (contexts[0], 8)):
        cache = _Cache(backend, config, requests, context + PAGE, kv_dtype)
        batch = cache.batch([(context, 1)] * requests, config.vocab_size)
        moved = requests * 2.0 * (context + 1) * a.num_kv_heads * a.head_dim * kv_dtype.itemsize
        operations = requests * 4.0 * a.num_heads * a.head_dim * (context + 1)
        name = f"{kind} decode, {requests} x {context} tokens"
        yield Case("attention", name, _attend(backend, config, cache, batch), moved, operations, moved, "GB")
    for tokens in contexts:
        cache = _Cache(backend, config, 1, tokens, kv_dtype)
        batch = cache.batch([(0, tokens)], config.vocab_size)
        operations = 2.0 * a.num_heads * a.head_dim * tokens * (tokens + 1)
        moved = 2.0 * tokens * (a.num_heads * WIDTH + a.num_kv_heads * kv_dtype.itemsize) * a.head_dim
        call = _attend(backend, config, cache, batch)
        yield Case(
            "attention", f"{kind} prefill, {tokens} tokens", call, moved, operations, operations, "GFLOP"
        )


def _attend(backend: Backend, config: ModelConfig, cache: _Cache, batch: Batch) -> Callable[[], Any]:
    """A call for the next layer, so that no layer's pages are still in a cache from the call before."""
    a, tokens = config.attention, batch.token_ids.numel()
    q = torch.randn(tokens, a.num_heads, a.head_dim)
    k, v = torch.randn(2, tokens, a.num_kv_heads, a.head_dim)
    layers = itertools.cycle(cache.views.attention)
    return lambda: backend.paged_attention(q, k, v, next(layers), batch, scale=a.head_dim**-0.5)


def delta_cases(backend: Backend, config: ModelConfig, tokens: int = 512) -> Iterator[Case]:
    """The gated delta rule: 7 · dk · dv operations per token and value head (decay, Sᵀk, update, Sᵀq).

    A chunk reads and writes its state once; the state of a decode is read and written for one token.
    """
    d = config.delta
    if d is None or not config.num_recurrent_layers:
        return
    heads, channels = d.num_value_heads, 2 * d.num_key_heads * d.key_dim + d.num_value_heads * d.value_dim
    per_state = heads * d.key_dim * d.value_dim
    for requests, each, name in ((1, tokens, "prefill"), (1, 1, "decode"), (8, 1, "decode")):
        cache = _Cache(backend, config, requests, each + PAGE)
        batch = cache.batch([(0 if each > 1 else 1, each)] * requests, config.vocab_size)
        total = requests * each
        qkv = torch.randn(total, channels)
        b, a = torch.randn(2, total, heads)
        decay, bias = -torch.rand(heads), torch.zeros(heads)
        layers = itertools.cycle(cache.views.recurrent)
        moved = 2.0 * requests * per_state * WIDTH + total * (channels + heads * d.value_dim) * WIDTH
        call = partial(_next_delta, backend, (qkv, b, a, decay, bias), layers, batch)
        case = f"{name}, {requests} x {each} tokens"
        yield Case("gated delta", case, call, moved, 7.0 * total * per_state, total, "tokens")


def _next_delta(
    backend: Backend, inputs: tuple[torch.Tensor, ...], layers: Iterator[RecurrentCache], batch: Batch
) -> torch.Tensor:
    qkv, b, a, decay, bias = inputs
    return backend.gated_delta(qkv, b, a, decay, bias, next(layers), batch)


def row_cases(backend: Backend, config: ModelConfig) -> Iterator[Case]:
    """Norms and activations, which work on rows that the kernel before left in a cache: no ceiling."""
    hidden, inner = config.hidden_size, config.intermediate_size or config.hidden_size
    weight = torch.ones(hidden)
    for rows in (1, 64):
        x, y, wide = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.randn(rows, 2 * inner)
        calls: dict[str, Callable[[], Any]] = {
            "rms_norm": partial(backend.rms_norm, x, weight, 1e-6),
            "add_rms_norm": partial(backend.add_rms_norm, x, y, weight, 1e-6),
            "silu_and_mul": partial(backend.silu_and_mul, wide),
        }
        for name, call in calls.items():
            yield Case(name, f"M={rows}", call, 0, 0, rows, "tokens")


def sampling_cases(config: ModelConfig) -> Iterator[Case]:
    """The sampler: greedy, and drawn with top-k and top-p."""
    drawn = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    for name, params in (("greedy", SamplingParams(temperature=0)), ("top-k 50, top-p 0.95", drawn)):
        for count in (1, 16):
            logits = torch.randn(count, config.vocab_size)
            admissions = [Admission(str(i), params, i, (1,), 1) for i in range(count)]
            rows = [Row(RequestState(admission, config.vocab_size), 1) for admission in admissions]
            yield Case(
                "sampling", f"{name}, {count} rows", partial(sample, logits, rows), 0, 0, count, "tokens"
            )
