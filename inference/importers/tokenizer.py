"""A ``tokenizer.json`` from the metadata of a GGUF file: byte-level BPE of the families we know.

GGUF names the rule that cuts text into words (``tokenizer.ggml.pre``) but does not carry it. A wrong rule gives other
tokens for the same text and a quietly worse model, so an unknown name is refused. The rules are those of each
family's own ``tokenizer.json``; llama.cpp's copies are in its ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from inference.artifact import BrokenArtifact

_CONTROL, _USER_DEFINED = 3, 4

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordRule:
    """How a family cuts text before merging.

    ``split`` is a regular expression for words; empty means GPT-2's own. ``digits_alone`` cuts each digit off first.
    ``ignores_merges`` takes a word that is a token whole. ``adds_bos`` holds where the file does not say.
    """

    split: str = ""
    digits_alone: bool = False
    nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = WordRule(_SPLIT.replace("{DIGITS}", "{1,3}"), ignores_merges=True, adds_bos=True)
WORD_RULES: Mapping[str, WordRule] = {
    "gpt-2": WordRule(),
    "smollm": WordRule(digits_alone=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": WordRule(_SPLIT.replace("{DIGITS}", ""), nfc=True),
}


def build_tokenizer(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """The tokenizer that the metadata of the GGUF file named ``file`` describes.

    Control tokens become special tokens, user-defined ones plain added tokens. A leading BOS is added only by
    ``encode(..., add_special_tokens=True)``, and only where the model was trained so.

    Raises:
        BrokenArtifact: another kind of tokenizer, an unknown word rule, or lists that contradict each other.
    """
    rule = _word_rule(metadata, file)
    tokens, types, merges = _lists(metadata, file)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise _broken(file, "tokens", "a token occurs twice.")
    tokenizer = Tokenizer(_model(vocab, merges, rule, file))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens, rule, file)
    _add_tokens(tokenizer, tokens, types)
    return tokenizer


def load_tokenizer(text: str, file: str) -> tuple[Tokenizer, str]:
    """The tokenizer in ``text``, a ``tokenizer.json``, and the text to store.

    Truncation and padding written into the file would cut prompts silently or lengthen them; they are removed.

    Raises:
        BrokenArtifact: the tokenizers library cannot read it.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise BrokenArtifact(
            file, "", f"no readable tokenizer ({error}).", "Save it again with tokenizers."
        ) from error
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer, text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, tokenizer.to_str()


def _word_rule(metadata: Mapping[str, Any], file: str) -> WordRule:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise BrokenArtifact(
            file,
            "tokenizer.ggml.model",
            f"{kind!r} is not supported.",
            "Import a model with a 'gpt2' (byte-level BPE) tokenizer, or its Hugging Face directory.",
            code="unsupported_model",
        )
    name = str(metadata.get("tokenizer.ggml.pre"))
    if name not in WORD_RULES:
        raise BrokenArtifact(
            file,
            "tokenizer.ggml.pre",
            f"{name!r} is not supported; supported are {', '.join(sorted(WORD_RULES))}.",
            "Import the model's Hugging Face directory instead.",
            code="unsupported_model",
        )
    return WORD_RULES[name]


def _lists(
    metadata: Mapping[str, Any], file: str
) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    tokens = _list(metadata, "tokens", str, file)
    types = _list(metadata, "token_type", int, file)
    if not tokens or len(types) != len(tokens):
        raise _broken(file, "token_type", f"{len(types)} types for {len(tokens)} tokens.")
    merges = []
    for merge in _list(metadata, "merges", str, file):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise _broken(file, "merges", f"{merge[:80]!r} is not two tokens.")
        merges.append((left, right))
    return tokens, types, merges


def _list(metadata: Mapping[str, Any], name: str, kind: type, file: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise _broken(file, name, "missing, or not a list of the right type.")
    return value


def _model(
    vocab: dict[str, int], merges: list[tuple[str, str]], rule: WordRule, file: str
) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignores_merges)
    except Exception as error:  # the library raises no narrower type
        raise _broken(file, "merges", f"{error}.") from error


def _pre_tokenizer(rule: WordRule) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.split))
    return pre_tokenizers.Sequence(steps)


def _post_processor(
    metadata: Mapping[str, Any], tokens: list[str], rule: WordRule, file: str
) -> processors.PostProcessor:
    if not metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos):
        return processors.ByteLevel(trim_offsets=False)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if not isinstance(bos_id, int) or not 0 <= bos_id < len(tokens):
        raise _broken(file, "bos_token_id", f"{bos_id!r} is no token, but one is to be added.")
    return processors.TemplateProcessing(
        single=[f"{tokens[bos_id]}:0", "$A:0"],
        pair=[f"{tokens[bos_id]}:0", "$A:0", "$B:1"],
        special_tokens=[(tokens[bos_id], bos_id)],
    )


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, type_ in zip(tokens, types, strict=True) if type_ == kind]
        tokenizer.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token in added]
        )


def _broken(file: str, field: str, problem: str) -> BrokenArtifact:
    return BrokenArtifact(
        file,
        f"tokenizer.ggml.{field}",
        problem,
        "Export the file again with llama.cpp's converter.",
    )
