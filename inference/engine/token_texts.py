"""What single tokens are as text: the bytes that each adds, whole characters or not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from inference.protocol import TokenLogprob

# A token of the SentencePiece family that is one byte of a character.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

_MAX_ID = 2**32 - 1
_MAX_ANCHORS_TRIED = 4_096


def is_silent(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether the token has no text: it is special, negative or beyond the vocabulary."""
    if not 0 <= token_id <= _MAX_ID or not tokenizer.id_to_token(token_id):
        return True
    return not tokenizer.decode([token_id], skip_special_tokens=True) and bool(
        tokenizer.decode([token_id], skip_special_tokens=False)
    )


class TokenTexts:
    """The texts of a tokenizer's tokens, in the form of ``TokenLogprob.token``; each is worked out once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, bool], str] = {}

    def text_of(self, token_id: int, *, at_start: bool = False) -> str:
        """What the token adds to a text; ``at_start`` where nothing stands before it.

        There a SentencePiece decoder drops the space that a word begins with. A control token adds nothing, and is called
        by its name.
        """
        key = (token_id, at_start)
        if key not in self._texts:
            self._texts[key] = TokenLogprob.to_token(self._bytes_of(token_id, at_start=at_start))
        return self._texts[key]

    def is_silent(self, token_id: int) -> bool:
        """Whether the token has no text."""
        return is_silent(self._tokenizer, token_id)

    def _bytes_of(self, token_id: int, *, at_start: bool) -> bytes:
        name = self._tokenizer.id_to_token(token_id) or ""
        if self.is_silent(token_id):
            return name.encode()
        if self._byte_alphabet:
            return self._from_alphabet(name)
        if match := BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        if at_start or self._anchor is None:
            return self._decode(token_id).encode()
        anchor_id, anchor_text = self._anchor
        return self._decode(anchor_id, token_id).removeprefix(anchor_text).encode()

    def _from_alphabet(self, name: str) -> bytes:
        alphabet = self._byte_alphabet
        if all(character in alphabet for character in name):
            return bytes(alphabet[character] for character in name)
        return name.encode()  # an added token, which is written as it is

    @cached_property
    def _byte_alphabet(self) -> dict[str, int]:
        """The byte that each character of a byte-level vocabulary stands for; empty where it is of another kind."""
        decoder = self._tokenizer.decoder
        kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else ()
        if "ByteLevel" not in kinds:
            return {}
        # Bytes that print stand for themselves; the others, in order, for the characters from U+0100 on
        # (Radford et al. 2019, GPT-2, bytes_to_unicode of encoder.py).
        printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(0x100) if byte not in printing]
        alphabet = {chr(byte): byte for byte in printing}
        return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}

    @cached_property
    def _anchor(self) -> tuple[int, str] | None:
        """A token whose text is the same wherever it stands, for others to stand behind."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), _MAX_ANCHORS_TRIED)):
            name = self._tokenizer.id_to_token(token_id) or ""
            if not self.is_silent(token_id) and not BYTE_TOKEN.fullmatch(name):
                text = self._decode(token_id)
                if text and text == name and text.isalnum():
                    return token_id, text
        return None

    def _decode(self, *token_ids: int) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """The kinds of a decoder and of those that it is made of."""
    yield decoder["type"]
    for each in decoder.get("decoders", ()):
        yield from _kinds(each)
