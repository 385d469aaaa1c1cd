"""Bytes that go back to applications."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.choices import Piece
from controlplane.gateway.parameters import Kind
from controlplane.gateway.replies import (
    Chunks,
    Header,
    error_event,
    error_reply,
    model_list,
    whole_answer,
)
from inference.protocol import Failure, Finished, FinishReason

FINISHED = Finished(FinishReason.LENGTH, 5, 2, 0.1, 0.2, 0.3)
WHOLE = [Piece(0, "Hi", finished=FINISHED)]


def header(kind: Kind, *, model: str = "m") -> Header:
    """The header of one answer."""
    return Header(kind, "r1", 1_700_000_000, model)


def events(content: bytes) -> list[Any]:
    """The JSON of each event before ``[DONE]``."""
    blocks = content.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_a_whole_chat_answer_is_this_object() -> None:
    assert json.loads(whole_answer(header(Kind.CHAT), WHOLE, FINISHED)) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }


def test_a_whole_completion_is_this_object() -> None:
    answer = json.loads(whole_answer(header(Kind.COMPLETION), WHOLE, FINISHED))

    assert (answer["id"], answer["object"]) == ("cmpl-r1", "text_completion")
    assert answer["choices"] == [
        {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_a_stream_ends_with_one_reason_then_usage_then_done(
    kind: Kind, include_usage: bool
) -> None:
    chunks = Chunks(header(kind), include_usage=include_usage)
    content = chunks.start() + chunks.piece(WHOLE[0]) + chunks.finish(FINISHED)

    assert content.endswith(b"\n\ndata: [DONE]\n\n")
    seen = events(content)
    usage = seen.pop() if include_usage else None
    reasons = [event["choices"][0]["finish_reason"] for event in seen]
    assert reasons == [None] * (len(seen) - 1) + ["length"]
    assert all(("usage" in event) is include_usage for event in seen)
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 7


def test_no_text_is_no_chunk() -> None:
    assert Chunks(header(Kind.CHAT), include_usage=False).piece(Piece(0, "")) == b""


@given(kind=st.sampled_from(Kind), text=st.text(min_size=1), model=st.text(max_size=20))
def test_any_text_is_one_line_of_ascii_that_reads_back(kind: Kind, text: str, model: str) -> None:
    model = model.replace("\x00", "")
    event = Chunks(header(kind, model=model), include_usage=True).piece(Piece(0, text))

    assert event.isascii()
    assert len(event.decode().splitlines()) == 2
    (read,) = events(event)
    choice = read["choices"][0]
    assert (choice["delta"]["content"] if kind is Kind.CHAT else choice["text"]) == text
    assert read["model"] == model


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "overloaded_error"),
    ],
)
def test_an_error_has_openais_shape(status: int, kind: str) -> None:
    failure = Failure("c", "Why.", status, param="p")
    error = {"error": {"message": "Why.", "type": kind, "param": "p", "code": "c"}}

    assert json.loads(error_reply(failure)["content"]) == error
    assert error_reply(failure)["status"] == status
    assert events(error_event(failure)) == [error]


def test_a_status_that_is_no_error_becomes_a_500() -> None:
    assert error_reply(Failure("c", "m", 200))["status"] == 500
    assert error_reply(Failure("c", "m", 1000))["status"] == 500


def test_only_what_may_help_is_worth_a_retry() -> None:
    passing = error_reply(Failure("c", "m", 503, retry_after_s=9))["headers"]
    lasting = error_reply(Failure("c", "m", 502))["headers"]

    assert passing["retry-after"] == "9"
    assert "x-should-retry" not in passing
    assert lasting["x-should-retry"] == "false"


def test_a_model_list_is_this_object() -> None:
    assert json.loads(model_list(["a"])) == {
        "object": "list",
        "data": [{"id": "a", "object": "model", "created": 0, "owned_by": "tatkal"}],
    }
