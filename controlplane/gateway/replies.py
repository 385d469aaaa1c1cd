"""What goes back to an application, byte for byte as OpenAI sends it: objects, chunks, errors, SSE lines.

JSON is written in ASCII. A client that splits a stream with ``str.splitlines`` breaks at U+2028 and U+0085, which
generated text may contain; escaped, they are harmless.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from controlplane.gateway.choices import Piece
from controlplane.gateway.logprobs import chat_logprobs, completion_logprobs
from controlplane.gateway.parameters import Kind
from inference.protocol import Failure, FeedbackRecord, Finished

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
MODELS_CREATED = 0
"""Routes carry no date, and a constant keeps the reply the same on every gateway."""

_OBJECTS = {Kind.CHAT: "chat.completion", Kind.COMPLETION: "text_completion"}
_PREFIXES = {Kind.CHAT: "chatcmpl-", Kind.COMPLETION: "cmpl-"}
_ERROR_TYPES: dict[int, str] = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one answer repeats. ``created`` is epoch seconds.

    ``text_start`` is how many characters of prompt stand before the answer's, as far as we know.
    """

    kind: Kind
    request_id: str
    created: int
    model: str
    with_logprobs: bool = False
    text_start: int = 0

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The ``logprobs`` of a choice; None where they were not asked for."""
        if not self.with_logprobs:
            return None
        if self.kind is Kind.CHAT:
            return chat_logprobs(piece.tokens)
        return completion_logprobs(piece.tokens, text_start=self.text_start)


def whole_answer(header: Header, choices: Iterable[Piece], finished: Finished) -> bytes:
    """The reply to a request without ``stream``; each of ``choices`` is whole."""
    return _dumps(
        {
            **_head(header, _OBJECTS[header.kind]),
            "choices": [_whole_choice(header, each) for each in choices],
            "usage": _usage(finished),
        }
    )


def _whole_choice(header: Header, whole: Piece) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": whole.index}
    if header.kind is Kind.CHAT:
        choice["message"] = {"role": "assistant", "content": whole.text, "refusal": None}
    else:
        choice["text"] = whole.text
    reason = whole.finished.reason if whole.finished else None
    return choice | {"logprobs": header.logprobs(whole), "finish_reason": reason}


class Chunks:
    """The SSE events of one streamed answer: ``start``, then ``piece`` any number of times, then ``finish``.

    What does not change is encoded once for each choice: a chunk without log-probabilities costs one escape of its text.
    """

    def __init__(self, header: Header, *, n: int = 1, include_usage: bool) -> None:
        self._header = header
        self._kind = header.kind
        name = "chat.completion.chunk" if header.kind is Kind.CHAT else _OBJECTS[header.kind]
        self._head = _head(header, name)
        self._include_usage = include_usage
        self._usage = {"usage": None} if include_usage else {}
        self._frames = [
            self._event(index, self._text("\x00")).split(_dumps("\x00")) for index in range(n)
        ]

    def start(self) -> bytes:
        """The chunks that name the role, one for each choice; completions have none."""
        if self._kind is not Kind.CHAT:
            return b""
        first = {"delta": {"role": "assistant", "content": ""}}
        return b"".join([self._event(index, first) for index in range(len(self._frames))])

    def piece(self, piece: Piece) -> bytes:
        """One piece of a choice, and with its last one a chunk with the reason; nothing for nothing."""
        if piece.tokens:
            event = self._event(piece.index, self._text(piece.text), piece)
        elif piece.text:
            before, after = self._frames[piece.index]
            event = before + _dumps(piece.text) + after
        else:
            event = b""
        if piece.finished is None:
            return event
        last: dict[str, Any] = {"delta": {}} if self._kind is Kind.CHAT else {"text": ""}
        return event + self._event(piece.index, last, reason=piece.finished.reason)

    def finish(self, finished: Finished) -> bytes:
        """When every choice has ended: the usage if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return sse({**self._head, "choices": [], "usage": _usage(finished)}) + DONE

    def _text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._kind is Kind.CHAT else {"text": text}

    def _event(
        self,
        index: int,
        part: dict[str, Any],
        piece: Piece | None = None,
        *,
        reason: str | None = None,
    ) -> bytes:
        logprobs = self._header.logprobs(piece) if piece is not None else None
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": reason}
        return sse({**self._head, "choices": [choice], **self._usage})


def model_object(name: str) -> dict[str, Any]:
    """One endpoint, as an application sees it."""
    return {"id": name, "object": "model", "created": MODELS_CREATED, "owned_by": "tatkal"}


def model_list(names: Iterable[str]) -> bytes:
    """The reply of ``GET /v1/models``."""
    return _dumps({"object": "list", "data": [model_object(name) for name in names]})


def model(name: str) -> bytes:
    """The reply of ``GET /v1/models/{name}``."""
    return _dumps(model_object(name))


def feedback(record: FeedbackRecord) -> bytes:
    """That an opinion was taken down, and how it was understood."""
    return _dumps({"object": "feedback", "request_id": record.request_id, "rating": record.rating})


def error_reply(failure: Failure) -> dict[str, Any]:
    """``content``, ``status`` and ``headers`` of a failure that is told before the answer began.

    A server error without ``retry_after_s`` would only fail again, so the OpenAI package is told not to retry it.
    """
    status = failure.status if 400 <= failure.status <= 599 else 500
    headers = {"content-type": "application/json"}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(failure.retry_after_s)
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        headers["x-should-retry"] = "false"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return {"content": _dumps(_error(failure)), "status": status, "headers": headers}


def error_event(failure: Failure) -> bytes:
    """A failure in the middle of a stream. No ``[DONE]`` follows it, so no client takes it for an answer."""
    return sse(_error(failure))


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _dumps(value) + b"\n\n"


def _head(header: Header, name: str) -> dict[str, Any]:
    return {
        "id": _PREFIXES[header.kind] + header.request_id,
        "object": name,
        "created": header.created,
        "model": header.model,
    }


def _usage(finished: Finished) -> dict[str, int]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


def _error(failure: Failure) -> dict[str, Any]:
    default = "server_error" if failure.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": failure.message,
            "type": _ERROR_TYPES.get(failure.status, default),
            "param": failure.param,
            "code": failure.code,
        }
    }


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
