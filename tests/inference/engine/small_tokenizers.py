"""Tokenizers small enough to read, built as the real families build theirs."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    *(("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ġ", "w"), ("o", "r")),
    *(("Ġw", "or"), ("l", "d"), ("Ġwor", "ld"), ("Ġ", "<"), ("i", "m"), ("e", "n"), ("en", "d")),
)


def byte_level(
    *, special: tuple[str, ...] = CONTROL, added: tuple[str, ...] = (), bos: str = ""
) -> Tokenizer:
    """A byte-level BPE as GPT-2's; ``bos`` is put before every text that is encoded with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = (*special, *alphabet, *(first + second for first, second in MERGES))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(vocabulary)}, merges=list(MERGES)
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def sentence_piece() -> Tokenizer:
    """A BPE with byte fallback as Llama 2's: spaces are ``▁``, and the decoder drops the very first one."""
    pieces = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
    words = ("▁", "▁Hello", "▁world", "Hello", "world", "!", "\N{REPLACEMENT CHARACTER}", "▁▁")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate((*pieces, *words))},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that is there."""
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id
