"""Streaming text: whole characters, the same text as at once, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inference.engine.detokenizer import REPLACEMENT, Detokenizer, StopMatcher
from inference.engine.prompt import load_tokenizer
from tests.inference.engine.small_tokenizers import byte_level, id_of, sentence_piece

BYTE_LEVEL = byte_level(added=("<think>",))
SENTENCE_PIECE = sentence_piece()
TEXTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "日本語のテキスト、한국어, ไทย",
    "🙂🎉 family: 👨‍👩‍👧‍👦, flag: 🇮🇳, tone: 👍🏽",
    "a\N{COMBINING ACUTE ACCENT}e\N{ZERO WIDTH JOINER} end",
]

token_ids = st.lists(
    st.integers(-3, BYTE_LEVEL.get_vocab_size() + 20) | st.sampled_from([2**32, 2**70])
)
byte_ids = st.lists(st.integers(3, 258))


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), prompt: Sequence[int] = ()
) -> list[str]:
    """The deltas of all tokens, and of the flush, as the engine asks for them."""
    detokenizer = Detokenizer(tokenizer, prompt, stop)
    deltas = []
    for token_id in ids:
        delta, is_stopped = detokenizer.push(token_id)
        deltas.append(delta)
        if is_stopped:
            return deltas
    return [*deltas, detokenizer.flush()]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of all tokens at once, without the mark of a character that was left incomplete at its end.

    The library itself cannot take ids that are no 32-bit numbers.
    """
    text = tokenizer.decode([id for id in ids if 0 <= id < 2**32], skip_special_tokens=True)
    return text.removesuffix(REPLACEMENT)


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_of_several_tokens_appears_whole(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    deltas = stream(BYTE_LEVEL, ids)
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)
    # Nothing waits once its character is complete.
    assert deltas[-1] == ""


@given(token_ids)
@settings(max_examples=200)
def test_the_deltas_are_the_whole_text_for_any_tokens(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, ids)) == decode(BYTE_LEVEL, ids)


@given(byte_ids)
@settings(max_examples=200)
def test_the_deltas_are_the_whole_text_for_any_bytes(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, ids)) == decode(BYTE_LEVEL, ids)


@given(st.lists(st.integers(0, SENTENCE_PIECE.get_vocab_size() + 2)))
@settings(max_examples=200)
def test_a_decoder_with_byte_fallback_streams_its_whole_text(ids: list[int]) -> None:
    assert "".join(stream(SENTENCE_PIECE, ids)) == decode(SENTENCE_PIECE, ids)


@given(byte_ids, st.lists(st.integers(3, 258), max_size=6))
@settings(max_examples=200)
def test_a_prompt_changes_no_byte_level_text(ids: list[int], prompt: list[int]) -> None:
    assert stream(BYTE_LEVEL, ids, prompt=prompt) == stream(BYTE_LEVEL, ids)


def test_a_literal_replacement_character_is_kept() -> None:
    ids = BYTE_LEVEL.encode(f"a{REPLACEMENT}b").ids
    assert "".join(stream(BYTE_LEVEL, ids)) == f"a{REPLACEMENT}b"


@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_half_a_character_is_never_delivered_not_even_at_the_end(num_missing: int) -> None:
    ids = BYTE_LEVEL.encode("a🙂").ids[:-num_missing]
    assert "".join(stream(BYTE_LEVEL, ids)) == "a"


@pytest.mark.parametrize("token_id", [-1, -(2**40), 10**6, 2**32, 2**70])
def test_an_id_that_no_token_has_is_silent(token_id: int) -> None:
    assert Detokenizer(BYTE_LEVEL, (), ()).push(token_id) == ("", False)


def test_special_tokens_are_silent_and_other_added_tokens_are_not() -> None:
    ids = [id_of(BYTE_LEVEL, text) for text in ("<|im_end|>", "<think>", "<|endoftext|>")]
    assert stream(BYTE_LEVEL, ids) == ["", "<think>", "", ""]


def test_the_window_stays_small_whatever_the_stream() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, (), ())
    lone = BYTE_LEVEL.encode("🙂").ids
    for token_id in lone[:1] * 500 + lone[1:2] * 500:
        detokenizer.push(token_id)
        assert len(detokenizer._window) <= 4


def test_the_space_of_the_first_word_depends_on_what_it_follows() -> None:
    word, hello = id_of(SENTENCE_PIECE, "▁world"), id_of(SENTENCE_PIECE, "▁Hello")
    start = id_of(SENTENCE_PIECE, "<s>")
    assert "".join(stream(SENTENCE_PIECE, [word], prompt=[start, hello])) == " world"
    assert "".join(stream(SENTENCE_PIECE, [word], prompt=[hello, start])) == "world"
    assert "".join(stream(SENTENCE_PIECE, [word, word])) == "world world"


def test_a_run_of_byte_tokens_is_read_as_a_whole() -> None:
    euro = [id_of(SENTENCE_PIECE, f"<0x{byte:02X}>") for byte in "€".encode()]
    end = id_of(SENTENCE_PIECE, "!")
    assert stream(SENTENCE_PIECE, [*euro, end]) == ["", "", "", "€!", ""]
    assert stream(SENTENCE_PIECE, euro) == ["", "", "", "€"]


@pytest.mark.parametrize("split", range(1, 10))
def test_a_stop_string_across_tokens_is_never_seen(split: int) -> None:
    whole = "abDEFGHIJkl"
    matcher = StopMatcher(["DEFGHIJ"])
    first, _ = matcher.push(whole[:split])
    second, is_stopped = matcher.push(whole[split:])
    assert (first + second, is_stopped) == ("ab", True)


def test_only_what_begins_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("some text") == ("some text", False)
    assert matcher.push(" <") == (" ", False)
    assert matcher.push("/e") == ("", False)
    assert matcher.push("m><") == ("</em>", False)
    assert matcher.flush() == "<"


def test_of_two_stop_strings_the_first_to_be_complete_counts() -> None:
    assert StopMatcher(["abcdef", "cd"]).push("abcdef") == ("ab", True)
    assert StopMatcher(["cd", "bcd"]).push("abcdef") == ("a", True)


def test_nothing_follows_a_stop() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, (), ("b",))
    ids = BYTE_LEVEL.encode("abc").ids
    assert [detokenizer.push(token_id) for token_id in ids] == [
        ("a", False),
        ("", True),
        ("", True),
    ]
    assert detokenizer.flush() == ""


def cut_at_first_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that ends first, looked for in every prefix."""
    for end in range(len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    st.text("abAé🙂", max_size=40),
    st.lists(st.text("abAé🙂", min_size=1, max_size=4), max_size=4),
)
@settings(max_examples=250)
def test_the_stream_is_the_whole_text_cut_at_the_first_stop(text: str, stop: list[str]) -> None:
    deltas = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids, stop)
    assert "".join(deltas) == cut_at_first_stop(text, stop)


@given(byte_ids, st.lists(st.text("ab�", min_size=1, max_size=3), max_size=4))
@settings(max_examples=150)
def test_bad_bytes_are_cut_at_stop_strings_too(ids: list[int], stop: list[str]) -> None:
    deltas = stream(BYTE_LEVEL, ids, stop)
    assert "".join(deltas) == cut_at_first_stop(decode(BYTE_LEVEL, ids), stop)


@pytest.mark.slow
def test_the_real_vocabulary_streams_its_whole_text(real_artifact: Path) -> None:
    tokenizer = load_tokenizer(real_artifact)

    @given(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=60))
    @settings(max_examples=300, deadline=None)
    def check(ids: list[int]) -> None:
        assert "".join(stream(tokenizer, ids)) == decode(tokenizer, ids)

    check()
    for text in TEXTS:
        deltas = stream(tokenizer, tokenizer.encode(text).ids)
        assert "".join(deltas) == text
        assert not any(REPLACEMENT in delta for delta in deltas)
