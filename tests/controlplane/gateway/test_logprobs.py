"""Tokens beside their text: held back with it, cut with it, and shown in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.logprobs import (
    Alignment,
    PlacedToken,
    chat_logprobs,
    completion_logprobs,
)
from inference.engine.detokenizer import StopMatcher
from inference.protocol import FinishReason, TokenLogprob

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EMOJI = "🙂".encode()


def token(data: bytes | str, logprob: float = -0.5) -> TokenLogprob:
    text = data if isinstance(data, str) else TokenLogprob.to_token(data)
    return TokenLogprob(text, logprob, ((text, logprob), ("other", -2.0)))


def names(tokens: Sequence[PlacedToken]) -> list[str]:
    return [each.logprob.token for each in tokens]


def test_a_token_comes_with_its_text() -> None:
    alignment = Alignment()

    assert names(alignment.push("Hello", token("Hello"))) == ["Hello"]
    assert names(alignment.push(" world", token(" world"))) == [" world"]
    assert alignment.finish(LENGTH) == []


def test_the_parts_of_a_character_come_when_it_is_complete() -> None:
    alignment = Alignment()
    for byte in EMOJI[:-1]:
        assert alignment.push("", token(bytes([byte]))) == []

    told = alignment.push("🙂", token(EMOJI[-1:]))

    assert b"".join(TokenLogprob.to_bytes(each.logprob.token) for each in told) == EMOJI
    assert {each.offset for each in told} == {0}
    assert alignment.push("!", token("!"))[0].offset == 1


def test_what_may_begin_a_stop_string_waits_and_is_cut_with_it() -> None:
    alignment = Alignment()
    assert names(alignment.push("so", token("so"))) == ["so"]
    assert alignment.push("", token("EN")) == []

    assert alignment.push("", token("D and more")) == []
    assert alignment.finish(STOP) == []


def test_what_only_began_like_a_stop_string_comes_after_all() -> None:
    alignment = Alignment()
    alignment.push("", token("EN"))

    assert names(alignment.push("ENT", token("T"))) == ["EN", "T"]


def test_a_token_that_is_cut_in_two_is_shown_whole() -> None:
    alignment = Alignment()

    assert names(alignment.push("so", token("soEND"))) == ["soEND"]
    assert alignment.finish(STOP) == []


def test_the_limit_on_tokens_hides_no_byte() -> None:
    alignment = Alignment()
    alignment.push("", token(EMOJI[:2]))

    assert [TokenLogprob.to_bytes(name) for name in names(alignment.finish(LENGTH))] == [EMOJI[:2]]


def test_a_row_without_a_logprob_brings_only_text() -> None:
    alignment = Alignment()
    alignment.push("", token("a"))

    assert names(alignment.push("ab", None)) == ["a"]


@given(
    parts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=8),
    stop=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3),
    width=st.integers(1, 5),
)
def test_tokens_shown_cover_the_text_and_begin_within_it(
    parts: list[str], stop: str, width: int
) -> None:
    """However bytes are cut into tokens, and whatever a stop string cuts off."""
    data = "".join(parts).encode()
    tokens = [data[start : start + width] for start in range(0, len(data), width)]
    alignment, matcher, shown, text, seen = Alignment(), StopMatcher([stop]), [], "", b""
    is_stopped = False
    for part in tokens:
        seen += part
        whole = seen.decode("utf-8", "ignore")
        certain = whole[len(seen[: -len(part)].decode("utf-8", "ignore")) :]
        delta, is_stopped = matcher.push(certain)
        text += delta
        shown += alignment.push(delta, token(part))
        if is_stopped:
            break
    if not is_stopped:
        rest = matcher.flush()
        text += rest
        shown += alignment.push(rest, None) + alignment.finish(LENGTH)
    else:
        shown += alignment.finish(STOP)

    together = b"".join(TokenLogprob.to_bytes(name) for name in names(shown))
    assert together.decode("utf-8", "ignore").startswith(text)
    assert all(each.offset < max(len(text), 1) or not is_stopped for each in shown)
    assert is_stopped or together == data


def test_the_shape_of_a_chat_choice() -> None:
    shown = [PlacedToken(token("é", -0.25), 0), PlacedToken(token(EMOJI[:2]), 1)]

    assert chat_logprobs(shown) == {
        "content": [
            {
                "token": "é",
                "logprob": -0.25,
                "bytes": [195, 169],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.25, "bytes": [195, 169]},
                    {"token": "other", "logprob": -2.0, "bytes": [111, 116, 104, 101, 114]},
                ],
            },
            {
                "token": r"\xf0\x9f",
                "logprob": -0.5,
                "bytes": [240, 159],
                "top_logprobs": [
                    {"token": r"\xf0\x9f", "logprob": -0.5, "bytes": [240, 159]},
                    {"token": "other", "logprob": -2.0, "bytes": [111, 116, 104, 101, 114]},
                ],
            },
        ],
        "refusal": None,
    }


def test_the_shape_of_a_completion_choice() -> None:
    shown = [PlacedToken(token("é", -0.25), 0), PlacedToken(token(EMOJI[:2]), 1)]

    assert completion_logprobs(shown, text_start=4) == {
        "text_offset": [4, 5],
        "token_logprobs": [-0.25, -0.5],
        "tokens": ["é", r"bytes:\xf0\x9f"],
        "top_logprobs": [{"é": -0.25, "other": -2.0}, {r"bytes:\xf0\x9f": -0.5, "other": -2.0}],
    }


def test_the_token_itself_is_always_among_the_best_of_a_completion() -> None:
    unlikely = TokenLogprob("z", -9.0, (("a", -0.1), ("b", -0.2), ("a", -0.3)))
    (best,) = completion_logprobs([PlacedToken(unlikely, 0)], text_start=0)["top_logprobs"]

    assert best == {"a": -0.1, "b": -0.2, "z": -9.0}


@pytest.mark.parametrize("value", [float("-inf"), -20_000.0])
def test_an_impossible_token_has_openais_number(value: float) -> None:
    shown = [PlacedToken(TokenLogprob("a", value), 0)]

    assert chat_logprobs(shown)["content"][0]["logprob"] == -9999.0
    assert completion_logprobs(shown, text_start=0)["token_logprobs"] == [-9999.0]
