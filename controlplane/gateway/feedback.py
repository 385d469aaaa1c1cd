"""From the body of ``POST /v1/feedback`` to a line of the log, or a refusal that names the parameter."""

from __future__ import annotations

import re
from typing import Any

from controlplane.gateway.body import (
    InvalidRequest,
    check_label,
    check_number,
    check_text,
    missing,
    read_object,
    refuse_unknown,
    show,
)
from inference.protocol import FeedbackRecord

MAX_COMMENT_LENGTH = 2_000
WORDS = {"up": 1.0, "down": -1.0}

_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([0-9a-f]{32})")


def parse_feedback(body: bytes, *, key_id: str, now: float) -> FeedbackRecord:
    """What the caller of ``key_id`` thinks of one answer.

    Whether the answer was given to that key is for whoever stores it to check: the gateway remembers no request.

    Raises:
        InvalidRequest: some parameter is missing, malformed, out of range, or unknown.
    """
    data = read_object(body)
    refuse_unknown("", data, ("request_id", "rating", "comment"))
    comment = data.get("comment")
    return FeedbackRecord(
        request_id=_read_id(data.get("request_id")),
        key_id=key_id,
        rating=_read_rating(data.get("rating")),
        at=now,
        comment=""
        if comment is None
        else check_label("comment", comment, longest=MAX_COMMENT_LENGTH),
    )


def _read_id(value: Any) -> str:
    if value is None:
        raise missing("request_id")
    found = _ID.fullmatch(check_text("request_id", value))
    if found is None:
        raise InvalidRequest(
            f"request_id={show(value)} is no id of a request; send the x-request-id of the reply, or the id in its body.",
            param="request_id",
        )
    return found[1]


def _read_rating(value: Any) -> float:
    if value is None:
        raise missing("rating")
    if isinstance(value, str):
        if value not in WORDS:
            raise InvalidRequest(
                f'rating={show(value)} must be "up", "down", or a number from -1 to 1.',
                param="rating",
            )
        return WORDS[value]
    rating = check_number("rating", value)
    if not -1 <= rating <= 1:
        raise InvalidRequest(f"rating={rating} must be from -1 to 1.", param="rating")
    return rating
