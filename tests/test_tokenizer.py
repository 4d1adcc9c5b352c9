"""Tokenizers from folders and GGUF files, against ``transformers`` and the ``tokenizers`` library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from plait.text.gguf_tokenizer import tokenizer_from_metadata
from plait.text.pre_tokenizers import RULES
from plait.text.tokenizer import Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": tiny.save(tiny.byte_level(), root / "byte_level"),
        "byte_level_flag": tiny.save(tiny.byte_level(), root / "byte_level_flag", add_bos_token=True),
        "sentencepiece": tiny.save(tiny.sentencepiece(), root / "sentencepiece"),
    }


@pytest.mark.parametrize("name", ["byte_level", "byte_level_flag", "sentencepiece"])
def test_encodes_and_decodes_as_transformers(folders: dict[str, Path], name: str) -> None:
    ours, theirs = Tokenizer.load(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    for text in tiny.TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids)
    named = ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(ours, n) for n in named] == [getattr(theirs, n) for n in named]


def test_bos_is_not_added_to_a_rendered_chat(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["sentencepiece"])
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
    ids = tokenizer.encode_chat("<s>hi</s>")
    assert (ids.count(tokenizer.bos_token_id), ids[0], ids[-1]) == (1, 1, 2)


def test_shows_single_tokens(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])
    ids = tokenizer.encode("Où 🎉", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "Où 🎉".encode()
    assert tokenizer.token_text(tokenizer.encode("🎉")[0]).strip() in ("🎉", "\ufffd")
    assert tokenizer.token_text(1) == "<s>"
    spiece = Tokenizer.load(folders["sentencepiece"])
    assert spiece.token_bytes(spiece.token_id("<0xE2>") or 0) == b"\xe2"
    assert spiece.token_texts([spiece.token_id("▁the") or 0]) == [" the"]
    for beyond in (tokenizer.vocab_size, 10**6):
        assert (tokenizer.token_bytes(beyond), tokenizer.token_text(beyond)) == (b"", "")
    assert tokenizer.decode([beyond]) == ""


@given(st.lists(st.integers(0, 520), max_size=60), st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_decodes_as_the_library(ids: list[int], skip: bool) -> None:
    backend = _shared("byte_level").backend
    assert _shared("byte_level").decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 620), max_size=60), st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_decodes_as_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = _shared("sentencepiece")
    # The library drops a whole run of byte tokens if one of them is wrong; each of them alone is a run here.
    apart = [i for token in ids for i in ((token, 259) if 3 <= token < 259 else (token,))]
    assert tokenizer.decode(apart, skip) == tokenizer.backend.decode(apart, skip_special_tokens=skip)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_decoding_undoes_encoding(text: str) -> None:
    for name in ("byte_level", "sentencepiece"):
        tokenizer = _shared(name)
        if not any(t in text for t in tiny.SPECIAL):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_keeps_valid_characters_of_a_broken_run() -> None:
    tokenizer = _shared("sentencepiece")
    run = [tokenizer.token_id(f"<0x{b:02X}>") or 0 for b in "é".encode() + b"\xe2\x82"]
    assert tokenizer.decode(run) == "é\ufffd\ufffd"


_SHARED: dict[str, Tokenizer] = {}


def _shared(name: str) -> Tokenizer:
    if name not in _SHARED:
        backend = {"byte_level": tiny.byte_level, "sentencepiece": tiny.sentencepiece}[name]()
        _SHARED[name] = Tokenizer(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return _SHARED[name]


# Folders


def test_reads_chat_templates_in_every_form(tmp_path: Path) -> None:
    folder = tiny.save(tiny.byte_level(), tmp_path / "a", chat_template="one")
    assert Tokenizer.load(folder).chat_template == "one"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    folder = tiny.save(tiny.byte_level(), tmp_path / "b", chat_template=named)
    assert Tokenizer.load(folder).chat_templates == {"default": "d", "tool_use": "t"}
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).chat_template == "file"
    folder = tiny.save(tiny.byte_level(), tmp_path / "c")
    assert Tokenizer.load(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.load(folder).chat_template == "json"


def test_special_tokens_come_from_either_file(tmp_path: Path) -> None:
    folder = tiny.save(tiny.byte_level(), tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.load(folder).eos_token_id is None
    maps = {
        "eos_token": {"content": "</s>"},
        "pad_token": "<not there>",
        "additional_special_tokens": ["<tool>"],
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(maps))
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (2, None, 500)
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.special_tokens_map == {"eos_token": "</s>"}


def test_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"does not exist"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json and for a \.gguf file.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"tokenizer\.model, which is not read: write a tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(TokenizerError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    tiny.save(tiny.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json must hold a JSON object"):
        Tokenizer.load(tmp_path)


def test_refuses_a_decoder_that_cannot_stream(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match=r"WordPiece.*cannot be applied token by token"):
        Tokenizer.load(tiny.save(backend, tmp_path))


# GGUF


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_gguf_metadata_give_the_same_tokenizer(kind: str) -> None:
    backend = {"byte_level": tiny.byte_level, "sentencepiece": tiny.sentencepiece}[kind]()
    metadata = tiny.tokenizer_metadata(backend, "llama" if kind == "sentencepiece" else "gpt2")
    tokenizer = tokenizer_from_metadata(metadata | {"tokenizer.chat_template": "t"}, "a file")
    for text in tiny.TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == backend.decode(backend.encode(text).ids)
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (backend.get_vocab_size(), {0, 1, 2})
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.chat_template == "t"


def test_gguf_flags_decide_what_is_added() -> None:
    metadata = tiny.tokenizer_metadata(tiny.sentencepiece(), "llama")
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    flags = {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer = tokenizer_from_metadata(metadata | flags, "a file")
    ids = tokenizer.encode("dog")
    assert (ids[0] == 1, ids[-1] == 2, tokenizer.decode(ids)) == (False, True, "dog")
    assert tokenizer.token_bytes(ids[0])[:1] != b" "


SMOLLM2_IDS = {
    # by llama.cpp
    "Hello, world!": [19556, 28, 905, 17],
    "a 12345": [81, 216, 33, 34, 35, 36, 37],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
}


def test_smollm2_against_llama_cpp_and_transformers(
    smollm2: Path, smollm2_tokenizer: PreTrainedTokenizerFast
) -> None:
    ours, theirs = Tokenizer.load(smollm2), smollm2_tokenizer
    assert {text: ours.encode(text) for text in SMOLLM2_IDS} == SMOLLM2_IDS
    for text in [*tiny.TEXTS, *tiny.CORPUS[:6]]:
        # transformers does not know that this vocabulary was made with digits one by one.
        text = "".join(c for c in text if not c.isdigit())
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (49152, 1, 2, 2)
    assert ours.special_ids == frozenset(range(17))
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("name", sorted(set(GGUF_PRE_TOKENIZER_SPLITS) & set(RULES)))
def test_cuts_text_as_transformers(name: str) -> None:
    theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    ours = pre_tokenizers.Split(Regex(RULES[name].patterns[0]), behavior="isolated")
    for text in [*tiny.TEXTS, *tiny.CORPUS[:6]]:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_every_rule_keeps_the_text() -> None:
    decoder = decoders.ByteLevel()
    for rule in set(RULES.values()):
        for text in tiny.TEXTS:
            pieces = rule.build().pre_tokenize_str(text)
            assert decoder.decode([piece for piece, _ in pieces]) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, r"a file has no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, r"kind 'rwkv'.*known are 'gpt2' and 'llama'"),
        ({"tokenizer.ggml.pre": "new-thing"}, r"by the rule 'new-thing'.*known are .*smollm"),
        ({"tokenizer.ggml.merges": None}, r"without merges"),
        ({"tokenizer.ggml.merges": ["not there"]}, r"merges do not fit its vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"500 tokens, but 2 numbers in tokenizer\.ggml\.token_type"),
        ({"tokenizer.ggml.tokens": ["a"] * 500}, r"'a' is in its vocabulary twice"),
        ({"tokenizer.ggml.model": "llama"}, r"without scores"),
    ],
)
def test_damaged_metadata_are_named(change: dict[str, object], message: str) -> None:
    metadata = tiny.tokenizer_metadata(tiny.byte_level(), "gpt2") | change
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_metadata({k: v for k, v in metadata.items() if v is not None}, "a file")


def test_a_file_without_a_rule_is_read_with_a_warning() -> None:
    metadata = tiny.tokenizer_metadata(tiny.byte_level(), "gpt2")
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(UserWarning, match=r"does not say how text is cut"):
        tokenizer = tokenizer_from_metadata(metadata, "a file")
    assert tokenizer.decode(tokenizer.encode("Hello 123")) == "Hello 123"


def test_a_folder_with_one_gguf_file_has_its_tokenizer(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2)
    assert Tokenizer.load(tmp_path).vocab_size == 49152
    shutil.copy(__file__, tmp_path / "other.gguf")
    with pytest.raises(TokenizerError, match=r"is no GGUF file"):
        Tokenizer.load(tmp_path / "other.gguf")
