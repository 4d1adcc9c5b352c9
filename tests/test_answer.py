"""The text of an answer while it grows, against decoding it whole and against naive searching."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from plait.core.sampling_params import SamplingParams
from plait.text.answer import AnswerText, Piece
from plait.text.stop_strings import StopMatcher
from plait.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(tiny.byte_level(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
SENTENCEPIECE = Tokenizer(tiny.sentencepiece(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
TOKENIZERS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}

names = st.sampled_from(sorted(TOKENIZERS))
random_ids = st.lists(st.integers(0, 620), max_size=50)
"""Any tokens: mostly broken characters, special tokens, ids beyond the vocabulary."""
real_texts = st.text(st.sampled_from("ab cdé日本🎉\n."), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab cé日🎉"), min_size=1, max_size=4), min_size=1, max_size=3)


def run(answer: AnswerText, ids: list[int], finish: bool = True) -> list[Piece]:
    """Push all ids, with their index as payload, until a stop string."""
    pieces = []
    for index, token_id in enumerate(ids):
        pieces.append(answer.push(token_id, index))
        if pieces[-1].stopped is not None:
            break
    return [*pieces, answer.finish()] if finish else pieces


def joined(pieces: list[Piece]) -> tuple[str, list[int], str | None]:
    """Text, payloads and stop string of all pieces together."""
    stopped = [p.stopped for p in pieces if p.stopped is not None]
    return "".join(p.text for p in pieces), [i for p in pieces for _, i in p.tokens], (stopped or [None])[0]


# Detokenisation


@given(names, random_ids, st.booleans())
@settings(max_examples=400, deadline=None)
def test_increments_add_up_to_the_decoded_answer(name: str, ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = run(AnswerText(tokenizer, [], SamplingParams(skip_special_tokens=skip)), ids)
    text, tokens, stopped = joined(pieces)
    assert text == tokenizer.decode(ids, skip)
    if name == "byte_level":
        assert text == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert (tokens, stopped) == (list(range(len(ids))), None)


@given(names, st.text(max_size=30), st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_an_answer_continues_the_text_of_its_prompt(name: str, prompt: str, rest: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(prompt + rest)
    # Cut where a token begins, but inside no character.
    cut = next((i for i in range(len(ids)) if tokenizer.decode(ids[:i]) == prompt), len(ids))
    text, _, _ = joined(run(AnswerText(tokenizer, ids[:cut], SamplingParams()), ids[cut:]))
    assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_sentencepiece_drops_the_first_space_only_at_the_front() -> None:
    ids = [SENTENCEPIECE.token_id("▁the") or 0] * 2
    after_bos = joined(run(AnswerText(SENTENCEPIECE, [1], SamplingParams()), ids))[0]
    after_text = joined(run(AnswerText(SENTENCEPIECE, [1, *ids], SamplingParams()), ids))[0]
    assert (after_bos, after_text) == ("the the", " the the")


def test_a_character_waits_for_its_last_byte() -> None:
    ids = [SENTENCEPIECE.token_id(f"<0x{b:02X}>") or 0 for b in "🎉".encode()]
    pieces = run(AnswerText(SENTENCEPIECE, [5], SamplingParams()), ids, finish=False)
    assert [p.text for p in pieces] == ["", "", "", "🎉"]
    assert [p.tokens for p in pieces] == [[], [], [], [(t, i) for i, t in enumerate(ids)]]
    unfinished = run(AnswerText(SENTENCEPIECE, [5], SamplingParams()), ids[:3])
    assert joined(unfinished) == ("\ufffd\ufffd\ufffd", [0, 1, 2], None)


def test_tokens_come_with_their_first_character() -> None:
    """A broken character and the token after it are two characters, though they are decoded together."""
    broken, letter = SENTENCEPIECE.token_id("<0xE2>") or 0, SENTENCEPIECE.token_id("a") or 0
    answer = AnswerText(SENTENCEPIECE, [5], SamplingParams(stop="a"))
    pieces = run(answer, [broken, letter])
    assert joined(pieces) == ("\ufffd", [0], "a")


def test_tokens_without_text_come_with_the_next_one() -> None:
    a, b = (BYTE_LEVEL.token_id(c) or 0 for c in "ab")
    pieces = run(AnswerText(BYTE_LEVEL, [], SamplingParams()), [a, 1, 2, b, 1])
    assert [(p.text, [t for t, _ in p.tokens]) for p in pieces] == [
        ("a", [a]),
        ("", []),
        ("", []),
        ("b", [1, 2, b]),
        ("", []),
        ("", [1]),
    ]
    shown = run(AnswerText(BYTE_LEVEL, [], SamplingParams(skip_special_tokens=False)), [a, 1, b])
    assert [p.text for p in shown] == ["a", "<s>", "b", ""]


def test_the_end_token_can_be_kept_out_of_the_text() -> None:
    a, b = (BYTE_LEVEL.token_id(c) or 0 for c in "ab")
    answer = AnswerText(BYTE_LEVEL, [], SamplingParams())
    assert answer.push(a, "x") == Piece("a", [(a, "x")], [0])
    assert answer.push(b, "y", visible=False) == Piece()
    assert answer.finish() == Piece("", [(b, "y")], [1])


def test_without_detokenisation_tokens_pass_through() -> None:
    answer = AnswerText(None, [1], SamplingParams(detokenize=False))
    assert answer.push(7, "p") == Piece("", [(7, "p")])
    assert answer.finish() == Piece()
    with pytest.raises(ValueError, match="no tokenizer"):
        AnswerText(None, [], SamplingParams())


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    assert joined(run(AnswerText(tokenizer, [], SamplingParams()), [0, 1, 0]))[0] == "a b a"
    assert tokenizer.decode([0, 1, 0]) == tokenizer.backend.decode([0, 1, 0]) == "a b a"


def test_an_ended_answer_takes_no_more() -> None:
    answer = AnswerText(BYTE_LEVEL, [], SamplingParams())
    answer.finish()
    with pytest.raises(RuntimeError, match="has ended"):
        answer.push(5)
    assert answer.finish() == Piece()


def test_cost_per_token_does_not_grow() -> None:
    """Twenty thousand tokens of which half are hidden and all text may begin a stop string."""
    a = BYTE_LEVEL.token_id("a") or 0
    answer = AnswerText(BYTE_LEVEL, [], SamplingParams(stop=["a" * 30 + "b", "a" * 10 + "c"]))
    begin = time.process_time()
    for i in range(20_000):
        answer.push(a if i % 2 else 1)
    assert time.process_time() - begin < 2
    assert len(answer.finish().text) == 30


# Stop strings


def naive_stop(text: str, strings: list[str], search_from: int = 0) -> tuple[str, int] | None:
    """The stop string that is complete first, the longest of several, and the end of it."""
    for end in range(search_from + 1, len(text) + 1):
        found = [s for s in strings if end - len(s) >= search_from and text[:end].endswith(s)]
        if found:
            return max(found, key=len), end
    return None


@given(
    st.text(st.sampled_from("abc"), max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1)
)
@settings(max_examples=500, deadline=None)
def test_matcher_against_naive_search(text: str, strings: list[str]) -> None:
    matcher = StopMatcher(strings)
    found = matcher.feed(text)
    assert found == naive_stop(text, strings)
    if found is None:
        longest = max((n for s in strings for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert matcher.held == longest


@given(names, real_texts, stops, st.booleans(), st.integers(0, 6))
@settings(max_examples=500, deadline=None)
def test_stop_strings_against_the_whole_text(
    name: str, text: str, strings: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(
        stop=strings, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100
    )
    pieces = run(AnswerText(tokenizer, [], params), ids)
    shown, tokens, stopped = joined(pieces)

    begins = _first_characters(tokenizer, ids)
    # A stop string may begin with the first character that no token among the first min_tokens begins.
    early = max((b for b in begins[:min_tokens] if b is not None), default=-1)
    search_from = min((b for b in begins[min_tokens:] if b is not None and b > early), default=len(text))
    expected = naive_stop(text, strings, search_from)
    if expected is None:
        assert (shown, tokens, stopped) == (text, list(range(len(ids))), None)
        return
    string, end = expected
    cut = end if include else end - len(string)
    assert (shown, stopped) == (text[:cut], string)
    kept = next((i for i, begin in enumerate(begins) if begin is not None and begin >= cut), len(ids))
    assert tokens == list(range(min(kept, len(ids))))
    assert len(tokens) >= min(min_tokens, len(ids))


def _first_characters(tokenizer: Tokenizer, ids: list[int]) -> list[int | None]:
    """For each token, the character in which its first byte lies; None for a stripped space."""
    data = b"".join(map(tokenizer.token_bytes, ids))
    front = len(data) - len(tokenizer.detokenizer.strip_front(data))
    begins: list[int | None] = []
    size = 0
    for token_id in ids:
        after = size + len(tokenizer.token_bytes(token_id))
        first = max(front, size)
        begins.append(len(data[front:first].decode("utf-8", "ignore")) if after > first else None)
        size = after
    return begins


def test_nothing_is_held_back_longer_than_it_must() -> None:
    ids = [BYTE_LEVEL.token_id(c) or 0 for c in "abababc"]
    pieces = run(AnswerText(BYTE_LEVEL, [], SamplingParams(stop=["abx", "babd"])), ids)
    assert [p.text for p in pieces] == ["", "", "a", "", "ba", "", "babc", ""]


def test_stop_strings_see_visible_text_only() -> None:
    a, b = (BYTE_LEVEL.token_id(c) or 0 for c in "ab")
    hidden = run(AnswerText(BYTE_LEVEL, [], SamplingParams(stop="ab")), [b, a, 1, b])
    assert joined(hidden) == ("b", [0], "ab")
    shown = SamplingParams(stop="<s>", skip_special_tokens=False)
    assert joined(run(AnswerText(BYTE_LEVEL, [], shown), [b, a, 1, b])) == ("ba", [0, 1], "<s>")


def test_hidden_tokens_before_the_cut_stay() -> None:
    a, b = (BYTE_LEVEL.token_id(c) or 0 for c in "ab")
    assert joined(run(AnswerText(BYTE_LEVEL, [], SamplingParams(stop="b")), [a, 1, b])) == ("a", [0, 1], "b")
    keep = SamplingParams(stop="b", include_stop_str_in_output=True)
    assert joined(run(AnswerText(BYTE_LEVEL, [], keep), [a, 1, b])) == ("ab", [0, 1, 2], "b")


def test_a_stop_string_may_end_with_an_incomplete_character() -> None:
    ids = [SENTENCEPIECE.token_id(t) or 0 for t in ("a", "<0xF0>")]
    answer = AnswerText(SENTENCEPIECE, [5], SamplingParams(stop="\ufffd"))
    assert joined(run(answer, ids)) == ("a", [0], "\ufffd")


def test_smollm2_streams_unicode(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    text = "".join(tiny.TEXTS)
    pieces = run(AnswerText(tokenizer, [], SamplingParams()), tokenizer.encode(text))
    shown, tokens, _ = joined(pieces)
    visible = tokenizer.decode(tokenizer.encode(text))
    assert (shown, len(tokens)) == (visible, len(tokenizer.encode(text)))
    assert sum(1 for p in pieces if p.text) > len(pieces) // 2
