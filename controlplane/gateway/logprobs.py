"""Log-probabilities as OpenAI shows them: each token beside the text that it became part of.

An engine sends a token's log-probability at once, and its text when that is certain: when the character is complete and
no stop string can claim it any more. Here both meet again. What a stop string cut off is not shown, nor are tokens
without a text, such as the one that ends an answer; so the tokens shown, put together, are the text.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference.protocol import FinishReason, TokenLogprob

UNLIKELY = -9999.0
"""What OpenAI says of a token that is as good as impossible; JSON knows no minus infinity."""


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token, and at which character of the answer it begins. Tokens that share a character begin at the same one."""

    logprob: TokenLogprob
    offset: int


class Alignment:
    """The tokens of one choice, each held back until the first of its characters is delivered."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0
        self._num_delivered = 0
        self._held: deque[PlacedToken] = deque()

    def push(self, text: str, logprob: TokenLogprob | None) -> list[PlacedToken]:
        """A row has come: the tokens whose text it brings, in order."""
        if logprob is not None:
            self._held.append(PlacedToken(logprob, self._num_characters))
            data = TokenLogprob.to_bytes(logprob.token)
            self._num_characters += len(self._decoder.decode(data))
        self._num_delivered += len(text)
        return self._release(self._num_delivered)

    def finish(self, reason: FinishReason) -> list[PlacedToken]:
        """No row follows. The bytes of a last character that the limit on tokens left incomplete are still shown."""
        return self._release(self._num_characters + 1) if reason is FinishReason.LENGTH else []

    def _release(self, end: int) -> list[PlacedToken]:
        released = []
        while self._held and self._held[0].offset < end:
            released.append(self._held.popleft())
        return released


def chat_logprobs(tokens: Sequence[PlacedToken]) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    content = [
        {
            **_chat_token(token.logprob.token, token.logprob.logprob),
            "top_logprobs": [_chat_token(*best) for best in token.logprob.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[PlacedToken], *, text_start: int) -> dict[str, Any]:
    """The ``logprobs`` of a choice of ``/v1/completions``: four lists with an element for each token.

    Offsets count from the start of the prompt, which is ``text_start`` characters long. The token itself is always among
    the best ones; of two that look the same the more probable one is shown.
    """
    return {
        "text_offset": [text_start + token.offset for token in tokens],
        "token_logprobs": [_finite(token.logprob.logprob) for token in tokens],
        "tokens": [_legacy_name(token.logprob.token) for token in tokens],
        "top_logprobs": [_best_of(token.logprob) for token in tokens],
    }


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    data = TokenLogprob.to_bytes(token)
    return {"token": _name(token), "logprob": _finite(logprob), "bytes": list(data)}


def _best_of(logprob: TokenLogprob) -> dict[str, float]:
    best: dict[str, float] = {}
    for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
        best.setdefault(_legacy_name(token), _finite(value))
    return best


def _legacy_name(token: str) -> str:
    name = _name(token)
    return name if name == token else f"bytes:{name}"


def _name(token: str) -> str:
    """The token's text; of bytes that are none, each as ``\\xf0``."""
    data = TokenLogprob.to_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, UNLIKELY)
