"""Tokenizers from GGUF metadata give the tokens of each family's own tokenizer."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from inference.artifact import BrokenArtifact
from inference.importers.gguf_file import read_header
from inference.importers.tokenizer import WORD_RULES, build_tokenizer, load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\t\tand\nlines\n\n\nand trailing  ",
    "don't I'll WE'VE it's 's 'S",
    "1 12 123 1234567890 3.14159 1,000,000 0x1F 2024-05-06T07:08:09Z",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\tif x != 0:\n\t\tpass",
    "naïve café Ærøskøbing Straße ŒUVRE e\u0301 \u00a0\u2003x\u200b",
    "日本語のテキスト 中文字符 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 ☕️ 😀😀",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|> <|endoftext|>x<|im_end|",
    "https://example.org/a_b?c=d&e=%20#f \\n \\u0041 $x^2$ {{ }} <html>&amp;</html>",
    "\r\n windows\r\nlines\r\r\n",
    "\ufffd \u0000 \u007f",
    "x" * 300,
]


@pytest.fixture(scope="module")
def smollm2(gguf_path: Path) -> Tokenizer:
    """Ours, from the file of the demonstration."""
    return build_tokenizer(read_header(gguf_path).metadata, gguf_path.name)


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> Any:
    """transformers' own conversion of the same file."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)


def _has_digits_beyond_ascii(text: str) -> bool:
    return any(unicodedata.category(char).startswith("N") and not char.isascii() for char in text)


def _metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, "ab", "<s>", "<think>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4],
        "tokenizer.ggml.merges": ["a b"],
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _words(pre: str, text: str) -> list[str]:
    tokenizer = build_tokenizer(_metadata(pre=pre, add_bos_token=False), "tiny.gguf")
    assert tokenizer.pre_tokenizer is not None
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in words]


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_the_demonstration_model_has_the_tokens_of_transformers(
    smollm2: Tokenizer, reference: Any, text: str
) -> None:
    expected = reference.encode(text, add_special_tokens=False)

    assert smollm2.encode(text, add_special_tokens=False).ids == expected
    assert smollm2.decode(expected, skip_special_tokens=False) == reference.decode(expected)


# transformers builds every GPT-2 tokenizer alike and leaves out SmolLM2's rule that each digit stands alone. Its
# merges hold no digits, so this shows only behind a space, and only where a digit is several bytes.
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: not _has_digits_beyond_ascii(text)))
def test_any_text_has_the_tokens_of_transformers(
    smollm2: Tokenizer, reference: Any, text: str
) -> None:
    expected = reference.encode(text, add_special_tokens=False)

    assert smollm2.encode(text, add_special_tokens=False).ids == expected


def test_control_tokens_are_single_and_special(smollm2: Tokenizer) -> None:
    encoding = smollm2.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)

    assert (encoding.ids[0], encoding.ids[-1]) == (1, 2)
    assert smollm2.decode(encoding.ids, skip_special_tokens=True) == "hi"
    assert smollm2.get_added_tokens_decoder()[2].special


def test_the_stored_text_gives_the_same_tokenizer(smollm2: Tokenizer) -> None:
    stored, text = load_tokenizer(smollm2.to_str(), "tokenizer.json")

    assert text == smollm2.to_str()
    for sample in TEXTS:
        assert stored.encode(sample).ids == smollm2.encode(sample).ids


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234 IT'S\n\n x", ["it", "'s", " 1234", " IT", "'", "S", "\n\n", " x"]),
        ("smollm", "it's 12 ½", ["it", "'s", " ", "1", "2", " ", "½"]),
        ("smollm", "a  b", ["a", " ", " b"]),
        ("llama-bpe", "it's 1234567", ["it", "'s", " ", "123", "456", "7"]),
        ("llama-bpe", "IT'S (x)\n\n y", ["IT", "'S", " (", "x", ")\n\n", " y"]),
        ("qwen2", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("qwen2", "IT'S (x)\n\n y", ["IT", "'S", " (", "x", ")\n\n", " y"]),
    ],
)
def test_text_is_cut_into_the_words_of_the_family(pre: str, text: str, words: list[str]) -> None:
    assert _words(pre, text) == words


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_qwen2_cuts_words_as_transformers_does(text: str) -> None:
    qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    vocab = {token: index for index, token in enumerate(ALPHABET)}
    theirs = qwen2.Qwen2Tokenizer(vocab=vocab, merges=[]).backend_tokenizer
    ours = build_tokenizer(_metadata(pre="qwen2"), "tiny.gguf")
    assert ours.pre_tokenizer is not None
    assert ours.normalizer is not None

    normal = ours.normalizer.normalize_str(text)

    assert normal == theirs.normalizer.normalize_str(text)
    assert ours.pre_tokenizer.pre_tokenize_str(normal) == theirs.pre_tokenizer.pre_tokenize_str(
        normal
    )


def test_qwen2_composes_accents_first() -> None:
    tokenizer = build_tokenizer(_metadata(pre="qwen2"), "tiny.gguf")

    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_llama_takes_a_word_that_is_a_token_whole() -> None:
    tokens = [*ALPHABET, "abc"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [1] * 257, "merges": []}

    by_name = {
        pre: build_tokenizer(_metadata(pre=pre, add_bos_token=False, **changes), "tiny.gguf")
        for pre in WORD_RULES
    }

    assert by_name["llama-bpe"].encode("abc").ids == [256]
    assert len(by_name["gpt-2"].encode("abc").ids) == 3


@pytest.mark.parametrize(
    ("pre", "changes", "leads"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
    ],
)
def test_bos_leads_where_the_model_was_trained_so(
    pre: str, changes: dict[str, Any], leads: bool
) -> None:
    tokenizer = build_tokenizer(_metadata(pre=pre, bos_token_id=257, **changes), "tiny.gguf")

    plain = tokenizer.encode("x", add_special_tokens=False).ids

    assert tokenizer.encode("x").ids == ([257, *plain] if leads else plain)


def test_a_user_defined_token_is_whole_and_not_special() -> None:
    tokenizer = build_tokenizer(_metadata(), "tiny.gguf")

    encoding = tokenizer.encode("<think>ab<s>")

    assert encoding.ids == [258, 256, 257]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "<think>ab"


@pytest.mark.parametrize(
    ("changes", "named", "code"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: 'llama'", "unsupported_model"),
        ({"pre": "default"}, "tokenizer.ggml.pre: 'default'", "unsupported_model"),
        ({"pre": None}, "tokenizer.ggml.pre: 'None'", "unsupported_model"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens", "broken_artifact"),
        ({"tokens": [], "token_type": []}, "tokenizer.ggml.token_type", "broken_artifact"),
        ({"token_type": [1]}, "1 types for 259 tokens", "broken_artifact"),
        ({"token_type": None}, "tokenizer.ggml.token_type", "broken_artifact"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens", "broken_artifact"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges", "broken_artifact"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges", "broken_artifact"),
        ({"merges": ["x y"]}, "tokenizer.ggml.merges", "broken_artifact"),
        ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id", "broken_artifact"),
        ({"add_bos_token": True, "bos_token_id": 999}, "bos_token_id: 999", "broken_artifact"),
    ],
)
def test_a_tokenizer_that_would_differ_is_refused_by_name(
    changes: dict[str, Any], named: str, code: str
) -> None:
    with pytest.raises(BrokenArtifact, match=named) as caught:
        build_tokenizer(_metadata(**changes), "tiny.gguf")

    assert caught.value.code == code


def test_truncation_and_padding_of_a_file_are_not_taken_over() -> None:
    tokenizer = build_tokenizer(_metadata(), "tiny.gguf")
    expected = tokenizer.encode("abcdef").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=20)

    loaded, text = load_tokenizer(tokenizer.to_str(), "tokenizer.json")

    assert loaded.encode("abcdef").ids == expected
    assert json.loads(text)["truncation"] is None
    assert json.loads(text)["padding"] is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BrokenArtifact, match=r"tokenizer\.json: no readable tokenizer"):
        load_tokenizer(text, "tokenizer.json")
