"""From a checkpoint's folder to a model that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch

from plait.kernels.backend import Backend
from plait.kernels.layout import CacheLayout
from plait.models import llama, qwen3, qwen3_5
from plait.models.causal_lm import CausalLM
from plait.models.config import ModelConfig, Raw, UnsupportedModelError
from plait.models.layers import DecoderLayer
from plait.models.sources import DummySource, WeightSource
from plait.models.weights import Progress, Weights


class Family(Protocol):
    """What a family's module holds."""

    ARCHITECTURES: tuple[str, ...]

    def parse(self, architecture: str, raw: Raw) -> ModelConfig: ...

    def layer(self, config: ModelConfig, index: int, weights: Weights) -> DecoderLayer: ...


FAMILIES: dict[str, Family] = {
    architecture: family for family in (llama, qwen3, qwen3_5) for architecture in family.ARCHITECTURES
}


def parse_config(raw: Raw) -> ModelConfig:
    """The model that a parsed config.json describes.

    Raises:
        UnsupportedModelError: unknown architecture (lists those known), or a field that is not served.
    """
    names = raw.get("architectures") or ()
    known = ", ".join(FAMILIES)
    if not names:
        raise UnsupportedModelError(f"config.json names no architectures; known are {known}")
    architecture = next((name for name in names if name in FAMILIES), None)
    if architecture is None:
        raise UnsupportedModelError(f"architecture {', '.join(names)} is not built; known are {known}")
    return FAMILIES[architecture].parse(architecture, raw)


DAMAGE = (TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError)
"""What reading a file of the wrong shape ends in, where no check foresaw it."""


def config_from_folder(folder: Path | str) -> ModelConfig:
    """The model in a checkpoint's folder.

    Raises:
        UnsupportedModelError: no readable config.json, or one that is not served.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        if (path.parent / "adapter_config.json").exists():
            raise UnsupportedModelError(
                f"{folder} holds a LoRA adapter; adapters are not served: merge it into its base model"
            ) from error
        raise UnsupportedModelError(f"{path} does not exist: is {folder} the folder of a model?") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise UnsupportedModelError(f"{path} is nested too deeply to be a config") from error
    if not isinstance(raw, dict):
        raise UnsupportedModelError(f"{path} holds {type(raw).__name__}, not an object")
    try:
        return parse_config(raw)
    except DAMAGE as error:
        raise UnsupportedModelError(f"{path} has a field of the wrong kind: {error}") from error


def load_model(
    config: ModelConfig,
    source: WeightSource | DummySource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend,
    layout: CacheLayout,
    progress: Progress | None = None,
) -> CausalLM:
    """Read and pack the weights of a model.

    Args:
        config: what the model is.
        source: where its weights come from.
        dtype: of weights and activations.
        device: where it shall run.
        backend: its kernels.
        layout: its cache, from ``config.cache_layout``.
        progress: called with (tensors read, tensors in all).

    Raises:
        WeightError: a tensor is missing, left over, misshapen or unreadable.
        UnsupportedModelError: the backend cannot serve these dtypes or this page size.
    """
    reason = backend.supports(
        dtype=dtype,
        kv_dtype=layout.page.dtype,
        state_dtype=layout.state.dtype if layout.state else None,
        page_size=layout.page_size,
    )
    if reason:
        raise UnsupportedModelError(reason)
    weights = Weights(source, backend, dtype=dtype, device=device, progress=progress)
    layer = FAMILIES[config.architecture].layer
    return CausalLM(config, weights, layer, layout, dtype=dtype, device=torch.device(device))
