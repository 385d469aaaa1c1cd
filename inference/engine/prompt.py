"""What the model reads: messages, a text or token ids, turned into the ids of the prompt.

A caller's text never becomes a control token in a chat. The tokenizer would take ``<|im_end|>`` for one wherever it
stands, so that anybody could end their turn and speak as the system.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

from tokenizers import Tokenizer

from inference.artifact import CHAT_TEMPLATE, TOKENIZER, BrokenArtifact, read_manifest
from inference.engine.chat_template import BrokenTemplate, ChatTemplate, RenderFailed
from inference.engine.request import RequestRefused
from inference.protocol import ChatMessage, Failure, GenerateRequest

# Marks are private-use characters that occur in no text of the request.
_PRIVATE_USE = [chr(code) for code in range(0xE000, 0xF900)]
# A role that the template compares with its own words stays as it is, even where a word is a control token.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class Marks(NamedTuple):
    """Two characters: ``literal`` stands before a control token that is text, ``cut`` where nothing may join."""

    literal: str
    cut: str


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that the model's configuration names; None where it has none."""

    bos: int | None = None
    eos: int | None = None


class PromptEncoder:
    """Turns requests into token ids. Threads may share it; it changes nothing."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        special: SpecialTokens,
        chat_template: str | None = None,
    ) -> None:
        """Compile the template; ``vocab_size`` is the model's, which may be larger than the tokenizer's.

        Raises:
            BrokenTemplate: ``chat_template`` cannot be used.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._bos = special.bos
        self._adds_bos = encode_text(tokenizer, "", add_special_tokens=True)[:1] == [special.bos]
        self._chat: _ChatEncoder | None = None
        if chat_template is not None:
            tokens = {"bos_token": special.bos, "eos_token": special.eos}
            texts = {
                name: tokenizer.id_to_token(token_id)
                for name, token_id in tokens.items()
                if token_id is not None
            }
            template = ChatTemplate(
                chat_template, tokens={name: text for name, text in texts.items() if text}
            )
            self._chat = _ChatEncoder(tokenizer, template)

    @classmethod
    def load(cls, artifact: Path, tokenizer: Tokenizer | None = None) -> Self:
        """The encoder of the version at ``artifact``; ``tokenizer`` is its own, where it is loaded already.

        Raises:
            BrokenArtifact: the manifest, the tokenizer or the chat template cannot be used.
        """
        manifest = read_manifest(artifact)
        model = manifest.model
        template = None
        try:
            tokenizer = tokenizer or load_tokenizer(artifact)
            if CHAT_TEMPLATE in manifest.files:
                template = (artifact / CHAT_TEMPLATE).read_text(encoding="utf-8")
            return cls(
                tokenizer,
                vocab_size=model.vocab_size,
                special=SpecialTokens(model.bos_token_id, next(iter(model.eos_token_ids), None)),
                chat_template=template,
            )
        except (BrokenTemplate, OSError, UnicodeDecodeError) as error:
            raise BrokenArtifact(
                str(artifact / CHAT_TEMPLATE), "", f"{error}", "Mend the chat template."
            ) from error

    def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """The ids of the prompt; each is from 0 to below ``vocab_size``, and there is at least one.

        Raises:
            RequestRefused: the request has no prompt or several, or one that cannot be encoded (status 400).
        """
        given = (request.messages, request.prompt, request.prompt_token_ids)
        if sum(value is not None for value in given) != 1:
            raise refusal("prompt", "send exactly one of messages and prompt.")
        self._check_logit_bias(request.sampling.logit_bias)
        if request.prompt_token_ids is not None:
            return self._checked_ids(request.prompt_token_ids)
        if request.prompt is not None:
            return self._encode_text(request.prompt)
        return self._encode_messages(request.messages or ())

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """The ids of an answer that follows a prompt: no token is added, and what it spells is text, never control.

        Raises:
            RequestRefused: the text cannot be encoded.
        """
        _check_unicode("score_text", text)
        if self._chat is not None:
            return tuple(self._chat.encode_plain(text))
        return tuple(encode_text(self._tokenizer, text, add_special_tokens=False))

    def _check_logit_bias(self, logit_bias: Mapping[int, float]) -> None:
        for token_id in logit_bias:
            if not 0 <= token_id < self._vocab_size:
                raise refusal(
                    "logit_bias",
                    f"logit_bias token {token_id} is not in the vocabulary; "
                    f"use ids from 0 to {self._vocab_size - 1}.",
                )

    def _checked_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        if not token_ids:
            raise refusal("prompt", "prompt is empty; send at least one token.")
        check_token_ids(token_ids, self._vocab_size)
        return tuple(token_ids)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        _check_unicode("prompt", text)
        ids = encode_text(self._tokenizer, text, add_special_tokens=True) if text else []
        # A caller who writes the beginning-of-sequence token, and a tokenizer that adds it, mean one.
        if self._adds_bos and ids[1:2] == [self._bos]:
            ids = ids[1:]
        return self._checked_ids(ids)

    def _encode_messages(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if self._chat is None:
            raise refusal(
                "messages", "this model has no chat template; send a prompt to /v1/completions."
            )
        if not messages:
            raise refusal("messages", "messages is empty; send at least one message.")
        for message in messages:
            _check_unicode("messages", message.role + message.content + (message.name or ""))
        ids = self._chat.encode(messages)
        if not ids:
            raise refusal("messages", "the chat template made an empty prompt of the messages.")
        return tuple(ids)


class _ChatEncoder:
    """Renders messages and encodes the text so that only the template writes control tokens.

    Control tokens are the tokenizer's special tokens, and those other added tokens that the template itself writes;
    the rest (runs of spaces, words that a vocabulary was extended by) are ordinary in anybody's text.

    Where no caller's text plays a control token, which is the rule, the rendered text is encoded whole: cutting it up
    would change merges at the cuts. Texts are marked before rendering where they might, so that afterwards the
    template's own tokens are known. If they are fewer than the tokenizer would see, they are renamed to words that
    nobody can guess, and the whole text goes through a second tokenizer, in which control tokens have these names and
    everything else is the same. To it the caller's ``<|im_end|>`` is punctuation, in its full context.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        written = {
            token.content: token_id
            for token_id, token in added.items()
            if not token.content.isspace()
            and any(token.content in literal for literal in template.literals)
        }
        self._control = special | written
        self._pattern = _any_of(self._control)
        # What an assistant said earlier may hold the tokens it then said it with, such as those around a thought;
        # only special ones end a turn.
        self._marker = _Marker(self._control)
        self._assistant_marker = _Marker(special)
        self._names = _secret_names(self._control)
        self._renamed = _rename_added_tokens(tokenizer, self._names)
        # A new name gives a token a new id, which moves the ids of the added tokens behind it.
        self._original_ids = {
            self._renamed.token_to_id(self._names.get(token.content, token.content)): token_id
            for token_id, token in added.items()
        }

    def encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of the rendered messages.

        Raises:
            RequestRefused: the template refuses or fails, or a text cannot be kept apart from a control token.
        """
        marks = self._choose_marks(messages)
        rendered = self._render([self._marked(message, marks) for message in messages])
        text, written = self._rename_written(rendered, marks)
        plain = rendered.translate(dict.fromkeys(map(ord, marks)))
        if written == self._pattern.findall(plain):
            return encode_text(self._tokenizer, plain, add_special_tokens=False)
        ids = self._encode_renamed(text)
        self._check_apart(ids, [self._control[content] for content in written])
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of ``text``, in which nothing is a control token."""
        if self._pattern.search(text) is None:
            return encode_text(self._tokenizer, text, add_special_tokens=False)
        return self._encode_renamed(text)

    def _encode_renamed(self, text: str) -> list[int]:
        ids = encode_text(self._renamed, text, add_special_tokens=False)
        return [self._original_ids.get(token_id, token_id) for token_id in ids]

    def _choose_marks(self, messages: Sequence[ChatMessage]) -> Marks:
        texts = [text for message in messages for text in _fields(message).values()]
        used = set("".join((*texts, *self._template.literals)))
        free = tuple(islice((mark for mark in _PRIVATE_USE if mark not in used), 2))
        if len(free) < 2:
            raise refusal("messages", "messages use every private-use character; leave one out.")
        return Marks(free[0], free[1])

    def _marked(self, message: ChatMessage, marks: Marks) -> dict[str, str]:
        marker = self._assistant_marker if message.role == "assistant" else self._marker
        return {
            name: text if name == "role" and text in _ROLES else marker.mark(text, marks)
            for name, text in _fields(message).items()
        }

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._template.render(messages)
        except RenderFailed as error:
            code = "invalid_request" if error.is_refusal else "chat_template_error"
            raise refusal("messages", f"{error}", code=code) from error

    def _rename_written(self, rendered: str, marks: Marks) -> tuple[str, list[str]]:
        literal, cut = marks
        written: list[str] = []

        def replace(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][1:]
            written.append(match[1])
            return self._names[match[1]]

        control = self._pattern.pattern
        return re.sub(f"{literal}(?:{control})?|{cut}|({control})", replace, rendered), written

    def _check_apart(self, ids: Sequence[int], expected: Sequence[int]) -> None:
        control = frozenset(self._control.values())
        if [token_id for token_id in ids if token_id in control] != list(expected):
            raise refusal(
                "messages",
                "messages spell a control token that this tokenizer cannot take as text; "
                "put a space into it.",
            )


class _Marker:
    """Marks where a text holds a control token, or could become part of one together with its surroundings."""

    def __init__(self, control: Iterable[str]) -> None:
        self._control = tuple(control)
        self._pattern = _any_of(self._control)
        self._prefixes = {text[:end] for text in self._control for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in self._control for start in range(1, len(text))}
        self._longest = max(map(len, self._control), default=0)

    def mark(self, text: str, marks: Marks) -> str:
        """``text`` with a mark before each control token, and at an end that could join into one."""
        literal, cut = marks
        ends = range(1, min(self._longest, len(text)) + 1)
        could_end_one = any(text[:end] in self._suffixes for end in ends)
        could_begin_one = any(text[-end:] in self._prefixes for end in ends)
        could_be_inside = len(text) < self._longest and any(
            text in token for token in self._control
        )
        marked = self._pattern.sub(lambda match: literal + match[0], text)
        if could_end_one or could_be_inside:
            marked = cut + marked
        return marked + cut if could_begin_one else marked


def load_tokenizer(artifact: Path) -> Tokenizer:
    """The tokenizer of the version at ``artifact``.

    Raises:
        BrokenArtifact: the file is missing or is no tokenizer.
    """
    path = artifact / TOKENIZER
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower.
        raise BrokenArtifact(str(path), "", f"{error}.", "Import the model again.") from error


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of ``text``. A batch of one, because ``encode`` would hold the interpreter lock meanwhile."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse a prompt with an id that the model does not know: one would fail the whole step, and everybody in it."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise refusal(
                "prompt",
                f"prompt token {token_id} is not in the vocabulary; use ids from 0 to {vocab_size - 1}.",
            )


def refusal(param: str, message: str, *, code: str = "invalid_request") -> RequestRefused:
    """The exception for a request whose ``param`` the caller must mend."""
    return RequestRefused(Failure(code, message, HTTPStatus.BAD_REQUEST, param))


def _check_unicode(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refusal(
            param,
            f"{param} holds the lone surrogate U+{ord(text[error.start]):04X}; "
            "send whole characters.",
        ) from error


def _fields(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else {**fields, "name": message.name}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    # The tokenizer, too, takes the longest of several at the leftmost place.
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _secret_names(texts: Iterable[str]) -> dict[str, str]:
    nonce = secrets.token_hex(16)
    return {text: f"[{nonce}.{index}]" for index, text in enumerate(texts)}


def _rename_added_tokens(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return Tokenizer.from_str(json.dumps(data))
