"""Single tokens as bytes: put together they are the text, whatever the family of the tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inference.engine.token_texts import TokenTexts
from inference.protocol import TokenLogprob
from tests.inference.engine.small_tokenizers import byte_level, id_of, sentence_piece

BYTE_LEVEL, SENTENCE_PIECE = byte_level(added=("naïve ☕",)), sentence_piece()
TEXTS = {id(tokenizer): TokenTexts(tokenizer) for tokenizer in (BYTE_LEVEL, SENTENCE_PIECE)}


def put_together(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    texts = TEXTS[id(tokenizer)]
    parts = [
        texts.text_of(each, at_start=index == 0)
        for index, each in enumerate(ids)
        if not texts.is_silent(each)
    ]
    return b"".join(map(TokenLogprob.to_bytes, parts))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_byte_level_tokens_put_together_are_the_text(text: str) -> None:
    assert put_together(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids) == text.encode()


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=12))
def test_any_byte_level_tokens_decode_as_their_bytes_do(ids: list[int]) -> None:
    together = put_together(BYTE_LEVEL, ids)

    assert together.decode("utf-8", "replace") == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize(
    "names",
    [
        ("▁Hello", "▁world", "!"),
        ("Hello", "▁", "▁world"),
        ("▁▁", "▁Hello"),
        ("<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁Hello"),
        ("<s>", "▁Hello", "</s>"),
    ],
)
def test_sentence_piece_tokens_put_together_are_the_text(names: tuple[str, ...]) -> None:
    ids = [id_of(SENTENCE_PIECE, name) for name in names]
    spoken = [each for each in ids if not TEXTS[id(SENTENCE_PIECE)].is_silent(each)]

    assert put_together(SENTENCE_PIECE, spoken).decode() == SENTENCE_PIECE.decode(ids)


def test_a_word_begins_with_its_space_only_behind_other_text() -> None:
    texts = TEXTS[id(SENTENCE_PIECE)]
    word = id_of(SENTENCE_PIECE, "▁Hello")

    assert texts.text_of(word) == " Hello"
    assert texts.text_of(word, at_start=True) == "Hello"


def test_a_part_of_a_character_is_its_bytes() -> None:
    emoji = BYTE_LEVEL.encode("🙂").ids
    parts = [TEXTS[id(BYTE_LEVEL)].text_of(each) for each in emoji]

    assert [TokenLogprob.to_bytes(part) for part in parts] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert TokenLogprob.to_bytes(TEXTS[id(SENTENCE_PIECE)].text_of(id_of(SENTENCE_PIECE, "<0x99>")))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE])
def test_a_control_token_is_silent_and_called_by_its_name(tokenizer: Tokenizer) -> None:
    name = "</s>" if tokenizer is SENTENCE_PIECE else "<|im_end|>"
    texts = TEXTS[id(tokenizer)]

    assert texts.is_silent(id_of(tokenizer, name))
    assert texts.text_of(id_of(tokenizer, name)) == name
    assert not texts.is_silent(tokenizer.encode("!").ids[0])


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_an_id_that_no_token_has_is_silent(token_id: int) -> None:
    assert TEXTS[id(BYTE_LEVEL)].is_silent(token_id)
