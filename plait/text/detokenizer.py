"""From token ids to bytes, one token at a time.

The ``tokenizers`` library decodes whole sequences only. To stream, the decoder of a tokenizer is read once
into a rule "token -> bytes", after which the text of any sequence is the UTF-8 decoding of the concatenated
bytes. Two families of decoders exist among language models, and both have such a rule:

* byte-level BPE: each character of a token stands for one byte;
* SentencePiece: a marker stands for a space, ``<0xE2>`` for the byte E2, and the one space that the
  tokenizer put before the text is taken off again.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as Backend


class TokenizerError(ValueError):
    """A tokenizer that cannot be found, read or used; the message says what to do."""


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as in GPT-2: printable bytes stand for themselves, the others follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


BYTE_OF_CHAR = _byte_level_alphabet()
CHAR_OF_BYTE = {b: c for c, b in BYTE_OF_CHAR.items()}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler of SentencePiece: one U+FFFD for each byte that is not part of a character."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("plait-replace-each-byte", _replace_each_byte)


class Detokenizer:
    """The bytes of each token of one tokenizer.

    ``errors`` names the handler with which the concatenated bytes are decoded, and ``strip`` the bytes that
    are taken off once where a text begins (b"" for none).

    Raises:
        TokenizerError: the decoder has a step that cannot be applied token by token.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.errors = "replace"
        self.strip = b""
        if backend.decoder is None:
            # Words without a decoder are joined by spaces.
            self._joint = b" "
            self.strip = b" "
        else:
            self._joint = b""
            self._read(json.loads(backend.decoder.__getstate__()))
        self._cache: dict[int, bytes] = {}

    def _read(self, spec: dict[str, Any]) -> None:
        fused = False
        for step in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                    self.errors = "plait-replace-each-byte"
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                    self._replacements.append((pattern, content))
                case {"type": "Metaspace", "replacement": mark, **more}:
                    self._replacements.append((mark, " "))
                    if more.get("prepend_scheme", "always") != "never":
                        self.strip = b" "
                case {"type": "Strip", "content": content, "start": start, "stop": 0} if fused:
                    self.strip = content.encode() * start
                case _:
                    raise TokenizerError(
                        f"the tokenizer's decoder has the step {json.dumps(step, ensure_ascii=False)}, "
                        "which cannot be applied token by token; known are ByteLevel, Metaspace and "
                        "SentencePiece's Replace, ByteFallback, Fuse, Strip. Set skip_tokenizer_init and "
                        "decode ids yourself"
                    )

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds in the middle of a text; b"" for an id the vocabulary does not have."""
        found = self._cache.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            found = self._cache[token_id] = b"" if token is None else self._joint + self._bytes_of(token)
        return found

    def _bytes_of(self, token: str) -> bytes:
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        if self._byte_level and all(c in BYTE_OF_CHAR for c in token):
            return bytes(BYTE_OF_CHAR[c] for c in token)
        return token.encode("utf-8", "replace")

    def strip_front(self, data: bytes) -> bytes:
        """``data``, the first bytes of a text, without the front that the tokenizer had added."""
        for i in range(len(self.strip)):
            if data[i : i + 1] != self.strip[i : i + 1]:
                return data[i:]
        return data[len(self.strip) :]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence."""
        joined = b"".join(map(self.token_bytes, token_ids))
        return self.strip_front(joined).decode("utf-8", self.errors)
