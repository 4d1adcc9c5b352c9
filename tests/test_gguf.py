"""GGUF files: weights and config against ``transformers``, and every way a file can be damaged."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers.modeling_utils
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plait.models.generation import GenerationConfigError, GenerationDefaults, generation_config
from plait.models.gguf import GgufError, GgufSource, end_token_ids, gguf_config
from plait.text.gguf_file import read_header
from plait.text.tokenizer import Tokenizer, TokenizerError

HEADS = {"attn_q": 4, "attn_k": 2}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def hf_name(name: str) -> str:
    plain = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{plain[parts[0]]}.{parts[1]}"
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"


def original(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The checkpoint's tensor from which a converter makes ``tensor``: row by row, as plainly as can be."""
    heads = next((n for part, n in HEADS.items() if f".{part}." in name), None)
    if heads is None:
        return tensor
    size, result = tensor.shape[0] // heads, torch.empty_like(tensor)
    for head in range(heads):
        for i in range(size // 2):
            result[head * size + i] = tensor[head * size + 2 * i]
            result[head * size + size // 2 + i] = tensor[head * size + 2 * i + 1]
    return result


def write(path: Path, change: dict[str, Any] | None = None, **options: Any) -> Path:
    """A small Llama file, with some metadata changed (None: left out)."""
    metadata = {k: v for k, v in (tiny.LLAMA | (change or {})).items() if v is not None}
    return tiny.write_gguf(path / "model.gguf", metadata, tiny.llama_tensors(40), **options)


# Weights


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_weights_have_the_names_and_rows_of_a_checkpoint(tmp_path: Path, kind: Kind) -> None:
    source = GgufSource(write(tmp_path, kind=kind))
    tensors = tiny.llama_tensors(40)
    assert sorted(source.names()) == sorted(map(hf_name, tensors))
    floats = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    for name, tensor in tensors.items():
        got = source.get(hf_name(name))
        if tensor.ndim == 2:
            # Quantising twice and rounding alike keep this exact, whatever the type.
            tensor = torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        assert torch.equal(got.float(), original(name, tensor)), name
        assert got.dtype == (floats.get(kind, torch.float32) if tensor.ndim == 2 else torch.float32)
        assert got.is_contiguous()
        assert source.shape(hf_name(name)) == tuple(got.shape)
    assert source.config["dtype"] == str(floats.get(kind, torch.float32)).removeprefix("torch.")


@pytest.mark.filterwarnings("ignore:invalid value")  # random bytes make NaNs
@pytest.mark.parametrize(
    "kind", [k for k in Kind if k in GGML_QUANT_SIZES and k.name[0] in "QIT" and "_" in k.name]
)
def test_every_quantisation_of_the_library_is_read(tmp_path: Path, kind: Kind) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 256, (8, 256 // block * size), np.uint8)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in tiny.LLAMA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        expected = dequantize(packed, kind)
    except NotImplementedError:
        with pytest.raises(
            GgufError, match=rf"token_embd\.weight has the type {kind.value}, which cannot be deq"
        ):
            GgufSource(tmp_path / "model.gguf")
        return
    got = GgufSource(tmp_path / "model.gguf").get("model.embed_tokens.weight")
    assert np.array_equal(got.numpy(), expected, equal_nan=True)


def check_against_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks for a package here that it then does not use.
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda *_: True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs, source = model.state_dict(), GgufSource(path)
    tied = {"lm_head.weight"} if source.config["tie_word_embeddings"] else set()
    assert set(theirs) - tied == set(source.names())
    for name in source.names():
        assert torch.equal(source.get(name), theirs[name]), name
    config, ours = model.config.to_dict(), gguf_config(path)
    assert ours.pop("rms_norm_eps") == pytest.approx(config["rms_norm_eps"], rel=1e-6)
    rope = {"rope_theta": ours.pop("rope_theta"), "rope_type": "default"}
    assert (config["rope_parameters"], ours.pop("rope_scaling")) == (rope, None)
    assert ours.pop("eos_token_id") == [config["eos_token_id"]]
    for key in set(ours) - {"architectures"}:
        assert config[key] == ours[key], key


def test_a_small_file_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tiny.LLAMA | tiny.tokenizer_metadata(tiny.byte_level(), "gpt2")
    metadata["tokenizer.ggml.padding_token_id"] = 0
    path = tiny.write_gguf(tmp_path / "model.gguf", metadata, tiny.llama_tensors(500), Kind.Q8_0)
    check_against_transformers(path, monkeypatch)


@pytest.mark.slow
def test_smollm2_as_transformers(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_transformers(smollm2, monkeypatch)


def test_smollm2(smollm2: Path) -> None:
    source = GgufSource(smollm2)
    assert len(list(source.names())) == 272
    digests = {name: hashlib.sha256(source.get(name).numpy()).hexdigest()[:16] for name in SMOLLM2_WEIGHTS}
    assert digests == SMOLLM2_WEIGHTS
    config = source.config
    assert (config["tie_word_embeddings"], config["rope_theta"], config["rms_norm_eps"]) == (True, 1e5, 1e-5)
    assert generation_config(smollm2) == GenerationDefaults(eos_token_ids=(2,), bos_token_id=1)


SMOLLM2_WEIGHTS = {
    # start of the sha256 of float32 values, equal to those that transformers 5.24 makes
    "model.embed_tokens.weight": "3fd491c8066dd9dc",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab9",
    "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53",
    "model.layers.29.mlp.down_proj.weight": "c19605745425a11e",
    "model.norm.weight": "3b87f8e27335e67f",
}


# Config


def test_config_of_a_small_file(tmp_path: Path) -> None:
    config = gguf_config(write(tmp_path))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": [],
        "pad_token_id": None,
    }
    LlamaConfig(**config)


def test_config_says_what_the_tensors_say(tmp_path: Path) -> None:
    tensors = tiny.llama_tensors(40)
    del tensors["output.weight"]
    for layer in range(2):
        for part, size in {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}.items():
            tensors[f"blk.{layer}.{part}.bias"] = torch.arange(float(size))
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.LLAMA, tensors)
    config = gguf_config(path)
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (
        True,
        True,
        False,
    )
    bias = GgufSource(path).get("model.layers.1.self_attn.k_proj.bias")
    assert torch.equal(bias, original("blk.1.attn_k.", torch.arange(32.0)))
    del tensors["blk.0.attn_k.bias"]
    with pytest.raises(GgufError, match=r"biases for attn_q, attn_v, attn_output only"):
        gguf_config(tiny.write_gguf(tmp_path / "model.gguf", tiny.LLAMA, tensors))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_found_from_its_factors(tmp_path: Path, factor: float) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    hf = LlamaConfig(head_dim=64, rope_parameters={"rope_theta": 500_000.0, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    plain = 500_000.0 ** (-torch.arange(0, 64, 2) / 64)
    tensors = tiny.llama_tensors(40) | {"rope_freqs.weight": plain / scaled}
    change = {"llama.rope.freq_base": 500_000.0, "llama.rope.dimension_count": 64}
    change |= {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.LLAMA | change, tensors)
    assert gguf_config(path)["rope_scaling"] == scaling
    tensors["rope_freqs.weight"] *= torch.linspace(1, 2, 32)
    with pytest.raises(GgufError, match=r"factors in rope_freqs\.weight are not those of Llama 3\.1"):
        gguf_config(tiny.write_gguf(tmp_path / "model.gguf", tiny.LLAMA | change, tensors))


def test_other_rope_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert gguf_config(write(tmp_path, linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(GgufError, match=r"scales rotary positions by 'yarn'"):
        gguf_config(write(tmp_path, {"llama.rope.scaling.type": "yarn"}))


def test_end_tokens() -> None:
    tokens = ["a", "<|eot_id|>", "<|im_end|>", "<|eom_id|>", "</s>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 1, 3, 3]}
    assert end_token_ids(metadata | {"tokenizer.ggml.eos_token_id": 4}) == (4, 1, 3)
    assert end_token_ids({"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eos_token_id": 3}) == (3,)


# Damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": None}, r"its metadata has no llama\.block_count"),
        ({"llama.block_count": "two"}, r"llama\.block_count is 'two', not a whole number"),
        ({"llama.rope.freq_base": 3}, r"llama\.rope\.freq_base is 3, not a number above 0"),
        ({"llama.expert_count": 8}, r"mixture of experts"),
        ({"llama.attention.value_length": 8}, r"value_length is 8 and the size of a head 16"),
        ({"llama.attention.head_count": 8}, r"dimension_count is 16 and the size of a head 8"),
    ],
)
def test_metadata_that_do_not_hold_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        GgufSource(write(tmp_path, change))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    cases = {
        b"": r"cannot be read: it is empty",
        b"PK\x03\x04": r"is no GGUF file: it begins with b'PK",
        b"GGUF" + struct.pack("<I", 1): r"of version 1; versions 2 and 3 are read",
        b"GGUF" + struct.pack(">I", 3): r"big-endian",
    }
    for data, message in cases.items():
        path.write_bytes(data)
        with pytest.raises(GgufError, match=message):
            read_header(path)
    with pytest.raises(GgufError, match=r"does not exist"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(GgufError, match=r"cannot be read"):
        read_header(tmp_path)


def test_tensors_that_do_not_belong_are_named(tmp_path: Path) -> None:
    path, tensors = tmp_path / "model.gguf", tiny.llama_tensors(40)
    with pytest.raises(
        GgufError, match=r"holds the tensor 'blk\.0\.ssm_a\.weight', which no Llama model has"
    ):
        GgufSource(tiny.write_gguf(path, tiny.LLAMA, tensors | {"blk.0.ssm_a.weight": torch.ones(4)}))
    source = GgufSource(
        tiny.write_gguf(path, tiny.LLAMA, tensors | {"blk.0.attn_q.weight": torch.ones(60, 64)})
    )
    with pytest.raises(GgufError, match=r"attn_q\.weight has 60 rows for 4 heads of 16"):
        source.get("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(GgufError, match=r"has no tensor lm_tail"):
        source.get("lm_tail")
    del tensors["token_embd.weight"]
    with pytest.raises(GgufError, match=r"has no tensor token_embd\.weight; if it is one part of several"):
        GgufSource(tiny.write_gguf(path, tiny.LLAMA, tensors))
    other = path.read_bytes().replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"qwen2")
    path.write_bytes(other)
    with pytest.raises(GgufError, match=r"architecture 'qwen2'.*read for 'llama' only"):
        gguf_config(path)


def test_a_file_cut_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path)
    data, first = path.read_bytes(), min(t.offset for t in read_header(path).tensors.values())
    ends = [t.offset + 4 * int(np.prod(t.shape)) for t in read_header(path).tensors.values()]
    cut = tmp_path / "cut.gguf"
    for size in [*range(1, first, 3), *range(first, max(ends), 997), max(ends) - 1]:
        cut.write_bytes(data[:size])
        message = r"is no GGUF file" if size < 4 else r"it ends after|is cut short: tensor \S+ ends at byte"
        with pytest.raises(GgufError, match=message):
            GgufSource(cut)
    cut.write_bytes(data[: max(ends)])
    GgufSource(cut)


_HEADER_BYTES: list[bytes] = []


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_a_file_with_wrong_bytes_is_an_error_or_readable(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    if not _HEADER_BYTES:
        metadata = tiny.LLAMA | tiny.tokenizer_metadata(tiny.byte_level(), "gpt2")
        _HEADER_BYTES.append(
            tiny.write_gguf(folder / "w.gguf", metadata, tiny.llama_tensors(500)).read_bytes()
        )
        _HEADER_BYTES.append(bytes(min(t.offset for t in read_header(folder / "w.gguf").tensors.values())))
    changed = bytearray(_HEADER_BYTES[0])
    end = len(_HEADER_BYTES[1])
    place = st.one_of(st.integers(0, 800), st.integers(end - 2500, end - 1), st.integers(0, end - 1))
    for at, value in data.draw(st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=3)):
        changed[at] = value
    path = folder / "wrong.gguf"
    path.write_bytes(changed)
    for use in (
        lambda: [GgufSource(path).get(n) for n in GgufSource(path).names()],
        lambda: Tokenizer.load(path),
    ):
        with contextlib.suppress(GgufError, TokenizerError):
            use()


# Generation defaults of folders


def test_generation_defaults_of_a_folder(tmp_path: Path) -> None:
    folder = tiny.save(tiny.byte_level(), tmp_path)
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 9}, "bos_token_id": 1}')
    assert generation_config(folder) == GenerationDefaults((9, 2), 1)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [7, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}'
    )
    defaults = generation_config(folder)
    assert (defaults.eos_token_ids, defaults.bos_token_id, defaults.min_p) == ((7, 9, 2), 1, None)
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert defaults.sampling() == expected
    assert generation_config(tmp_path / "elsewhere") == GenerationDefaults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"generation_config\.json is no valid JSON"),
        ("[]", r"must hold a JSON object"),
        ('{"eos_token_id": "x"}', r"eos_token_id is 'x'"),
        ('{"temperature": "hot"}', r"temperature is 'hot'; it must be a number"),
    ],
)
def test_damaged_generation_configs_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(GenerationConfigError, match=message):
        generation_config(tmp_path)
