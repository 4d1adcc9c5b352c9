"""How byte-level tokenizers cut a text before merging, by the names that GGUF files give it.

A GGUF file names the rule (``tokenizer.ggml.pre``) and does not hold it. The patterns are those of the
models' own tokenizer.json files; the names, and which of them go with whole-word look-up and a bos token, are
llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_PATHS}|{_TAIL}"
_GPT4O = rf"{_LOWER_WORD}{_CONTRACTIONS}?|{_UPPER_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}|{_TAIL}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_FALCON = (
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """``patterns`` cut the text one after the other, or the empty tuple for GPT-2's own rule."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    """digits are cut off one by one first"""
    whole_words: bool = False
    """a word that is in the vocabulary becomes that token, whatever the merges say"""
    adds_bos: bool = False
    """a bos token comes first unless the file says otherwise"""

    def build(self) -> PreTokenizer:
        """The rule for the ``tokenizers`` library; its last step spells bytes as characters."""
        steps: list[PreTokenizer] = [Digits(individual_digits=True)] if self.single_digits else []
        steps += [Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return Sequence(steps)


_GPT2_RULE = PreTokenizerRule()
_DIGITS_RULE = PreTokenizerRule(single_digits=True)
_QWEN2_RULE = PreTokenizerRule((_QWEN2,))
_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), whole_words=True, adds_bos=True)
_LLAMA3_MERGED_RULE = PreTokenizerRule((_LLAMA3,))
_GPT4O_RULE = PreTokenizerRule((_GPT4O,))
_DEEPSEEK3_RULE = PreTokenizerRule(_DEEPSEEK3)

RULES: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling"), _GPT2_RULE),
    **dict.fromkeys(("exaone4", "gigachat", "mellum", "a.x-4.0"), _GPT2_RULE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_RULE),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS_RULE),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3_RULE),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_MERGED_RULE),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2_RULE),
    **dict.fromkeys(("hunyuan", "kormo", "solar-open", "grok-2"), _QWEN2_RULE),
    "qwen35": PreTokenizerRule((_QWEN35,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O_RULE),
    "tekken": PreTokenizerRule((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3_RULE),
    "falcon": PreTokenizerRule(_FALCON),
}
"""``tokenizer.ggml.pre`` to the rule it names."""
