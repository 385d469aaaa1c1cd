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

from controlplane.gateway.parameters import Kind
from inference.protocol import Failure, Finished

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
    """What every object of one answer repeats. ``created`` is epoch seconds."""

    kind: Kind
    request_id: str
    created: int
    model: str


def whole_answer(header: Header, text: str, finished: Finished) -> bytes:
    """The reply to a request without ``stream``."""
    choice: dict[str, Any] = {"index": 0}
    if header.kind is Kind.CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": finished.reason}
    return _dumps(
        {
            **_head(header, _OBJECTS[header.kind]),
            "choices": [choice],
            "usage": _usage(finished),
        }
    )


class Chunks:
    """The SSE events of one streamed answer: ``start``, then ``text`` any number of times, then ``finish``.

    What does not change is encoded once: a chunk costs one escape of its text.
    """

    def __init__(self, header: Header, *, include_usage: bool) -> None:
        self._kind = header.kind
        name = "chat.completion.chunk" if header.kind is Kind.CHAT else _OBJECTS[header.kind]
        self._head = _head(header, name)
        self._include_usage = include_usage
        self._usage = {"usage": None} if include_usage else {}
        self._before, self._after = self._event("\x00", None).split(_dumps("\x00"))

    def start(self) -> bytes:
        """The chunk that names the role; completions have none."""
        if self._kind is not Kind.CHAT:
            return b""
        return self._event_of({"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, text: str) -> bytes:
        """One piece of the answer; nothing for no text."""
        return self._before + _dumps(text) + self._after if text else b""

    def finish(self, finished: Finished) -> bytes:
        """The one chunk with a reason, the usage if it was asked for, and the end of the stream."""
        last: dict[str, Any] = {"delta": {}} if self._kind is Kind.CHAT else {"text": ""}
        events = self._event_of(last, finished.reason)
        if self._include_usage:
            events += sse({**self._head, "choices": [], "usage": _usage(finished)})
        return events + DONE

    def _event(self, text: str, reason: str | None) -> bytes:
        part = {"delta": {"content": text}} if self._kind is Kind.CHAT else {"text": text}
        return self._event_of(part, reason)

    def _event_of(self, part: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": reason}
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
