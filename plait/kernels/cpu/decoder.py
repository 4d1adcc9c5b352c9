"""All decoder layers in one native call.

Between two kernels called from Python lie some microseconds: tensors are made, shapes checked, threads sent
to sleep. A decode step of a small model has hundreds of kernels. So what cannot change between steps is
checked and handed over once, and native code goes from kernel to kernel (``csrc/layers.hpp``), with the same
calls on the same numbers: the bits are those of the single operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.kernels.backend import AttentionParams, DeltaParams, Packed
from plait.kernels.batch import Batch
from plait.kernels.cpu import packing
from plait.kernels.cpu.native import native
from plait.kernels.cpu.views import (
    at,
    batch_view,
    half_of,
    pages_view,
    states_view,
    taps_of,
    vector,
)
from plait.kernels.decoder import LayerParams, NormParams
from plait.kernels.layout import CacheViews


@dataclass(slots=True)
class _Stretch:
    """Layers that run in one call, and the feed-forward behind them where native code has none."""

    layers: Any
    feed_forward: Callable[[torch.Tensor], torch.Tensor] | None = None


class CpuDecoder:
    """See ``plait.kernels.decoder.Decoder``.

    Layers with a mixture of experts end a native call before it, and it is called as ever.

    Args:
        layers: from the first to the last; at least one.
        norm: behind them.

    Raises:
        ValueError: the shapes of a layer do not fit each other.
    """

    def __init__(self, layers: Sequence[LayerParams], norm: NormParams) -> None:
        self.seconds = {"gemm": 0.0, "attention": 0.0, "recurrence": 0.0}
        self._layers, self._norm = tuple(layers), norm  # keeps alive what native code has the addresses of
        self._hidden = layers[0].input_norm.weight.shape[0]
        self._stretches = [_Stretch(native.Layers(self._hidden))]
        for layer in layers:
            _append(self._stretches[-1].layers, layer, self._hidden)
            if layer.mlp is None:
                self._stretches[-1].feed_forward = layer.feed_forward
                self._stretches.append(_Stretch(native.Layers(self._hidden)))
        self._stretches[-1].layers.end(_norm(norm, self._hidden))
        heads = (layer.mixer.head_dim for layer in layers if isinstance(layer.mixer, AttentionParams))
        self._smallest_head = min(heads, default=native.largest_head)
        self._last_caches: tuple[weakref.ref[CacheViews], Any] | None = None

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, caches: CacheViews, batch: Batch
    ) -> torch.Tensor:
        tokens = batch.query_start_host[-1]
        if x.shape != (tokens, self._hidden) or not x.is_contiguous():
            raise ValueError(f"x is {list(x.shape)}; [{tokens}, {self._hidden}], contiguous, is needed")
        angles = at(cos), at(sin), half_of(cos, sin, tokens, self._smallest_head)
        views, rows = self._views(caches), batch_view(batch)
        total, x = x, torch.empty_like(x)
        for number, stretch in enumerate(self._stretches):
            spent = stretch.layers.run(views, rows, at(x), at(total), number == 0, *angles)
            for part, seconds in zip(self.seconds, spent, strict=True):
                self.seconds[part] += seconds
            if stretch.feed_forward is not None:
                x = stretch.feed_forward(x).contiguous()
        return x

    def _views(self, caches: CacheViews) -> Any:
        """The native views of the cache, made anew where it is not that of the last call."""
        last = self._last_caches
        if last is None or last[0]() is not caches:
            last = self._last_caches = (weakref.ref(caches), _view(self._layers, caches))
        return last[1]


def _append(layers: Any, layer: LayerParams, hidden: int) -> None:
    """Check a layer and hand it over."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionParams):
        native_mixer, mixed = _attention(mixer, layer.index), mixer.num_heads * mixer.head_dim
    else:
        native_mixer, mixed = _delta(mixer, layer.index), mixer.splits[1]
    gate_up: list[Any] = []
    down: list[Any] = []
    if layer.mlp is not None:
        inner = _own(layer.mlp[1]).inputs
        gate_up = _parts("gate_up", layer.mlp[0], hidden, 2 * inner)
        down = _parts("down", layer.mlp[1], inner, hidden)
    layers.append(
        input_norm=_norm(layer.input_norm, hidden),
        in_proj=_parts("in_proj", layer.in_proj, hidden, sum(mixer.splits)),
        mixer=native_mixer,
        out_proj=_parts("out_proj", layer.out_proj, mixed, hidden),
        post_norm=_norm(layer.post_norm, hidden),
        gate_up=gate_up,
        down=down,
    )


def _norm(norm: NormParams, size: int) -> tuple[int, float]:
    return vector(norm.weight, size), norm.eps


def _attention(params: AttentionParams, index: int) -> Any:
    q_norm, k_norm = (
        0 if norm is None else vector(norm, params.head_dim) for norm in (params.q_norm, params.k_norm)
    )
    return native.AttentionLayer(
        index=index, heads=params.num_heads, gated=params.output_gate, q_norm=q_norm, k_norm=k_norm,
        scale=params.scale, eps=params.eps,
    )  # fmt: skip


def _delta(params: DeltaParams, index: int) -> Any:
    heads = params.groups * params.value_heads
    return native.DeltaLayer(
        index=index,
        conv_weight=at(params.conv_weight),  # its shape depends on the cache: see _view
        decay_rate=vector(params.decay_rate, heads),
        dt_bias=vector(params.dt_bias, heads),
        norm=vector(params.norm, params.value_dim),
        eps=params.eps,
    )


def _own(packed: Packed) -> packing.Linear:
    assert isinstance(packed, packing.Linear), f"{type(packed).__name__} was packed by another backend"
    return packed


def _parts(name: str, packed: Packed, inputs: int, outputs: int) -> list[Any]:
    """The native matrices of a linear layer, whose shape must be this."""
    layer = _own(packed)
    if (layer.inputs, layer.outputs) != (inputs, outputs):
        raise ValueError(f"{name} is {layer.outputs} x {layer.inputs}; {outputs} x {inputs} is needed")
    return [part.native for part in layer.parts]


def _view(layers: Sequence[LayerParams], caches: CacheViews) -> Any:
    """Native views of all layers' pages and states. Raises ValueError where the cache is another model's."""
    pages: list[Any] = []
    states: list[Any] = []
    for layer in layers:
        mixer, index = layer.mixer, layer.index
        if isinstance(mixer, AttentionParams):
            assert index == len(pages)
            pages.append(pages_view(caches.attention[index], mixer.num_kv_heads, mixer.head_dim))
            continue
        assert index == len(states)
        cache = caches.recurrent[index]
        taps_of(mixer.conv_weight, mixer.splits[0], cache)
        ours = [mixer.groups, mixer.value_heads, mixer.key_dim, mixer.value_dim]
        if list(cache.temporal.shape[1:]) != ours:
            raise ValueError(f"states of {list(cache.temporal.shape[1:])} do not fit a layer of {ours}")
        states.append(states_view(cache))
    return native.Caches(pages, states)
