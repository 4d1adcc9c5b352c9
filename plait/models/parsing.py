"""Readers for parts of config.json that families share."""

from __future__ import annotations

from typing import Any

import torch

from plait.models.config import (
    DTYPES,
    AttentionConfig,
    LayerKind,
    Raw,
    RopeConfig,
    UnsupportedModelError,
)

_REQUIRED = object()

_LAYER_KINDS: dict[str, LayerKind] = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "recurrent",
}

ROPE_KINDS = ("default", "linear", "llama3")


def text_part(raw: Raw) -> Raw:
    """The language model's part: ``text_config`` of a multimodal checkpoint, with what only the top holds."""
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        return raw
    outer = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config")}
    given = {key: value for key, value in inner.items() if value is not None or key not in outer}
    # The head belongs to the whole model, so the top level says whether it is tied.
    tied = {"tie_word_embeddings": outer["tie_word_embeddings"]} if "tie_word_embeddings" in outer else {}
    return {**outer, **given, **tied}


def integer(raw: Raw, name: str, default: Any = _REQUIRED) -> int:
    """A whole number from 1 up."""
    value = raw.get(name)
    if value is None:
        if default is _REQUIRED:
            raise UnsupportedModelError(f"config.json has no {name}; without it the model's shape is unknown")
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {name}={value!r} must be a whole number from 1 up")
    return value


def check_common(raw: Raw) -> None:
    """Refuse what no family does: quantised checkpoints, other activations.

    Raises:
        UnsupportedModelError: naming the field.
    """
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModelError(
            f"quantization_config: checkpoints quantised by {method!r} are not built yet; "
            "use the float32, bfloat16 or float16 checkpoint of this model"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={activation!r}: only silu is built")


def refuse_sliding_window(raw: Raw, window: int | None) -> None:
    """Refuse a sliding window that would come into play.

    Args:
        raw: the text part of config.json.
        window: the window that would hold for some layer, in tokens; None for none.

    Raises:
        UnsupportedModelError: naming the field.
    """
    types = raw.get("layer_types") or ()
    if "sliding_attention" in types:
        raise UnsupportedModelError(
            "layer_types holds sliding_attention: attention over a sliding window is not built"
        )
    longest = integer(raw, "max_position_embeddings", 2048)
    if window is not None and window < longest:
        raise UnsupportedModelError(
            f"sliding_window={window} is below max_position_embeddings={longest}: attention over a sliding "
            f"window is not built; set max_position_embeddings to {window} or less in config.json to serve "
            "prompts that never leave the window"
        )


def layer_kinds(raw: Raw, default: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Kinds of the layers by ``layer_types``, or ``default`` when it is not given."""
    types = raw.get("layer_types")
    if types is None:
        return default
    unknown = sorted({str(kind) for kind in types} - set(_LAYER_KINDS))
    if unknown:
        raise UnsupportedModelError(
            f"layer_types holds {', '.join(unknown)}; known are {', '.join(_LAYER_KINDS)}"
        )
    count = integer(raw, "num_hidden_layers")
    if len(types) != count:
        raise UnsupportedModelError(f"layer_types names {len(types)} layers, num_hidden_layers is {count}")
    return tuple(_LAYER_KINDS[kind] for kind in types)


def all_attention(raw: Raw) -> tuple[LayerKind, ...]:
    """Layers of a model without recurrence."""
    kind: LayerKind = "attention"
    return (kind,) * integer(raw, "num_hidden_layers")


def attention_config(raw: Raw, *, head_dim: int | None = None, **traits: bool) -> AttentionConfig:
    """Heads of full attention; ``head_dim``: what holds when config.json gives none."""
    heads = integer(raw, "num_attention_heads")
    kv_heads = integer(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    size = integer(raw, "head_dim", head_dim or integer(raw, "hidden_size") // heads)
    bias = bool(raw.get("attention_bias", False))
    return AttentionConfig(heads, kv_heads, size, qkv_bias=bias, out_bias=bias, **traits)


def rope_config(raw: Raw, head_dim: int, *, theta: float = 10_000.0, partial: float = 1.0) -> RopeConfig:
    """Rotary embedding from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        raw: the text part of config.json.
        head_dim: numbers per head.
        theta, partial: the family's base and rotated fraction when config.json gives none.

    Raises:
        UnsupportedModelError: naming an unknown rope type, or a missing number.
    """
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "mrope":  # multimodal rotary: for text all three position axes agree, and it is the default
        kind = "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not built; known are {', '.join(ROPE_KINDS)}")
    fraction = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    dim = int(head_dim * (partial if fraction is None else fraction))
    if dim < 2 or dim % 2:
        raise UnsupportedModelError(
            f"partial_rotary_factor={fraction} of head_dim={head_dim} rotates {dim} numbers a head; "
            "it must be an even number from 2 up"
        )
    base = given.get("rope_theta", raw.get("rope_theta"))
    base = float(theta if base is None else base)
    if kind == "default":
        return RopeConfig(base, dim)
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        raise UnsupportedModelError(f"rope type {kind!r} needs {', '.join(missing)} in config.json")
    return RopeConfig(base, dim, kind, **{name: given[name] for name in needed})


def dtype_named(name: Any, field: str, default: torch.dtype) -> torch.dtype:
    """The torch dtype for a name in config.json; ``default`` when it is not given."""
    if name is None:
        return default
    key = str(name).removeprefix("torch.")
    if key not in DTYPES:
        raise UnsupportedModelError(f"{field}={name!r} is not built; known are {', '.join(DTYPES)}")
    return DTYPES[key]


def common_fields(raw: Raw) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that mean the same in every family."""
    eos = raw.get("eos_token_id")
    return {
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": integer(raw, "hidden_size"),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": integer(raw, "max_position_embeddings", 2048),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": dtype_named(raw.get("dtype", raw.get("torch_dtype")), "dtype", torch.float32),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "bos_token_id": raw.get("bos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
    }
