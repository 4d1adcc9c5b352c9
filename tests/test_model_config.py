"""config.json: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, checkpoint

from plait.models.config import AttentionConfig, DeltaConfig, MoeConfig, RopeConfig, UnsupportedModelError
from plait.models.registry import config_from_folder, parse_config
from plait.models.rotary import BLOCK, RotaryTable, inverse_frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "eos_token_id": [2, 7], "bos_token_id": 1,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "tie_word_embeddings": True,
    "vision_config": {"depth": 2}, "image_token_id": 5,
    "text_config": {
        **{key: value for key, value in LLAMA.items() if key not in ("architectures", "torch_dtype")},
        "num_hidden_layers": 9, "head_dim": 32, "full_attention_interval": 4, "dtype": "bfloat16",
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "attn_output_gate": True, "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 56, "mtp_num_hidden_layers": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
    },
}  # fmt: skip


def with_text(**changes: Any) -> dict[str, Any]:
    return {**QWEN3_5, "text_config": {**QWEN3_5["text_config"], **changes}}


def test_llama() -> None:
    config = parse_config(LLAMA)
    assert config.layers == ("attention",) * 3
    assert config.attention == AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16)
    assert config.rope == RopeConfig(theta=10_000.0, rotary_dim=16)
    assert config.eos_token_ids == (2, 7)
    assert (config.dtype, config.delta, config.moe) == (torch.bfloat16, None, None)
    assert not config.tie_word_embeddings


def test_biases_are_honoured() -> None:
    config = parse_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert config.attention.qkv_bias
    assert config.attention.out_bias
    assert config.mlp_bias


def test_qwen3_5_nested_in_a_multimodal_config() -> None:
    config = parse_config(QWEN3_5)
    assert config.layers == (*("recurrent",) * 3, "attention") * 2 + ("recurrent",)
    assert config.delta == DeltaConfig(2, 6, 8, 24, 4)
    assert config.moe == MoeConfig(10, 3, 48, 56, renormalise=True)
    assert config.rope == RopeConfig(theta=10_000_000.0, rotary_dim=8)
    assert config.attention.output_gate
    assert config.attention.head_norm
    assert config.norm_plus_one
    assert config.tie_word_embeddings, "the head belongs to the whole model: its top level decides"
    assert any("vision" in note for note in config.notes)


def test_description_says_which_layers_are_which() -> None:
    words = parse_config(QWEN3_5).describe()
    assert "attention: layers 3, 7 (2 of 9)" in words
    assert "recurrent (Gated DeltaNet): layers 0-2, 4-6, 8 (7 of 9)" in words
    assert "experts: 3 of 10 and a shared one" in words
    assert "vision: not loaded" in words
    assert "recurrent: none" in parse_config(LLAMA).describe()


def test_cache_layout_follows_the_config() -> None:
    config = parse_config(QWEN3_5)
    layout = config.cache_layout(32, dtype=torch.bfloat16)
    assert (layout.page.num_layers, layout.page.num_kv_heads, layout.page.head_dim) == (2, 2, 32)
    assert layout.page.dtype == torch.bfloat16
    assert layout.state is not None
    state = layout.state
    assert (state.num_layers, state.num_groups, state.value_heads) == (7, 2, 3)
    assert (state.conv_dtype, state.dtype) == (torch.bfloat16, torch.float32)
    other = config.cache_layout(16, dtype=torch.float32, kv_dtype=torch.int8, state_dtype=torch.bfloat16)
    assert other.page.quantised
    assert other.state is not None
    assert other.state.dtype == torch.bfloat16
    assert parse_config(LLAMA).cache_layout(16, dtype=torch.float32).state is None


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_that_transformers_writes(family: str) -> None:
    config = config_from_folder(checkpoint(family))
    settings = FAMILIES[family][1]
    assert config.num_layers == settings["num_hidden_layers"]
    assert config.attention.head_dim == settings["head_dim"]


# Rotary


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_llama3_scaling_old_and_new_style(style: str, name: str) -> None:
    scaling = {name: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 2048}  # fmt: skip
    theta = {"rope_theta": 500_000.0}
    raw = {**LLAMA, style: {**scaling, **theta}} if style == "rope_parameters" else {**LLAMA, **theta}
    raw = {**raw, style: {**raw.get(style, {}), **scaling}}
    assert parse_config(raw).rope == RopeConfig(500_000.0, 16, "llama3", 8.0, 1.0, 4.0, 2048)


@pytest.mark.parametrize(
    ("rope", "extra"),
    [
        (RopeConfig(10_000.0, 24), {"rope_type": "default"}),
        (RopeConfig(10_000.0, 24, "linear", 3.0), {"rope_type": "linear", "factor": 3.0}),
        (
            RopeConfig(10_000.0, 24, "llama3", 4.0, 1.0, 4.0, 256),
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 256},
        ),
    ],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(rope: RopeConfig, extra: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": rope.theta, **extra}
    oracle = LlamaRotaryEmbedding(LlamaConfig(head_dim=24, rope_parameters=parameters))
    torch.testing.assert_close(inverse_frequencies(rope), oracle.inv_freq, rtol=1e-6, atol=0)


def test_a_rotary_row_does_not_depend_on_when_it_was_asked_for() -> None:
    rope, position = RopeConfig(10_000.0, 10), torch.tensor([BLOCK + 77])
    early, late = (RotaryTable(rope, torch.device("cpu")) for _ in range(2))
    late.rows(torch.arange(5), 5)
    late.rows(torch.arange(10), BLOCK + 1)
    for one, other in zip(early.rows(position, 3 * BLOCK), late.rows(position, BLOCK + 78), strict=True):
        assert torch.equal(one, other)


# Refusals


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**LLAMA, "architectures": ["GptFiveForCausalLM"]},
         r"architecture GptFiveForCausalLM is not built; known are LlamaForCausalLM, .*Qwen3_5Moe"),
        ({**LLAMA, "architectures": None}, "names no architectures; known are LlamaForCausalLM"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not built"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' needs low_freq_factor"),
        ({**MISTRAL, "sliding_window": 4096}, "sliding_window=4096 is below max_position_embeddings=8192"),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, "sliding_window=4096 is below"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 2},
         "sliding_window=1024 is below"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
         "layer_types holds sliding_attention"),
        (with_text(layer_types=["linear_attention", "mamba"] + ["full_attention"] * 7),
         "layer_types holds mamba; known are"),
        (with_text(layer_types=["linear_attention"]), "names 1 layers, num_hidden_layers is 9"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}},
         "quantization_config: checkpoints quantised by 'fp8' are not built yet"),
        ({**QWEN3_5, "quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_"),
        (with_text(linear_num_value_heads=5), "linear_num_value_heads=5 is no multiple"),
        (with_text(attn_output_gate=False), "attn_output_gate=false"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "config.json has no hidden_size"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number"),
        ({**LLAMA, "torch_dtype": "int8"}, "dtype='int8' is not built"),
        (with_text(mamba_ssm_dtype="float8"), "mamba_ssm_dtype='float8' is not built"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_config(raw)


def test_sliding_windows_that_never_come_into_play_are_fine() -> None:
    parse_config({**MISTRAL, "sliding_window": 8192})
    parse_config({**QWEN3, "use_sliding_window": False, "sliding_window": 1024})
    parse_config({**QWEN3, "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 28})
    parse_config({**LLAMA, "sliding_window": 16})


def test_folders_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json does not exist: is .* the folder of"):
        config_from_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"a LoRA adapter.*merge it into its base model"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="is not JSON"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnsupportedModelError, match="holds list, not an object"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert config_from_folder(tmp_path).architecture == "LlamaForCausalLM"
