"""What callers may say of an answer, and that it is taken down for the key that said it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.gateway.body import InvalidRequest
from controlplane.gateway.feedback import parse_feedback
from inference.protocol import FeedbackRecord
from tests.controlplane.gateway.conftest import Served

ID = "0123456789abcdef0123456789abcdef"


def parse(**fields: Any) -> FeedbackRecord:
    body = {"request_id": ID, "rating": "up"} | fields
    return parse_feedback(json.dumps(body).encode(), key_id="k1", now=7.0)


@pytest.mark.parametrize(
    ("rating", "number"), [("up", 1.0), ("down", -1.0), (0, 0.0), (-0.5, -0.5), (1, 1.0)]
)
def test_a_rating_is_a_word_or_a_number(rating: object, number: float) -> None:
    assert parse(rating=rating) == FeedbackRecord(ID, "k1", number, 7.0)


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
def test_a_request_is_named_by_its_id_in_header_or_body(prefix: str) -> None:
    assert parse(request_id=prefix + ID).request_id == ID


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"request_id": None}, "request_id", "Missing"),
        ({"request_id": "x" * 32}, "request_id", "x-request-id"),
        ({"request_id": ID.upper()}, "request_id", "no id of a request"),
        ({"request_id": 7}, "request_id", "must be a string"),
        ({"rating": None}, "rating", "Missing"),
        ({"rating": "good"}, "rating", '"up", "down"'),
        ({"rating": 1.5}, "rating", "from -1 to 1"),
        ({"rating": True}, "rating", "must be a number"),
        ({"rating": 1e400}, "rating", "finite"),
        ({"comment": "c" * 2_001}, "comment", "at most 2000"),
        ({"comment": "a\x00"}, "comment", "no NUL"),
        ({"comment": ["x"]}, "comment", "must be a string"),
        ({"stars": 5}, "stars", "Unknown parameter"),
    ],
)
def test_what_cannot_be_taken_down_is_refused_by_name(
    fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        parse(**fields)
    assert refused.value.param == param


def test_feedback_is_accepted_and_recorded_for_its_key(gateway: Served) -> None:
    with gateway.http() as client:
        reply = client.post(
            "/v1/feedback", json={"request_id": ID, "rating": "down", "comment": "Wrong."}
        )

    assert reply.status_code == 202
    assert reply.json() == {"object": "feedback", "request_id": ID, "rating": -1.0}
    (record,) = gateway.fake.wait_for_records()
    assert isinstance(record, FeedbackRecord)
    assert (record.key_id, record.rating, record.comment) == ("tests1", -1.0, "Wrong.")


def test_feedback_needs_a_key_and_the_right_method(gateway: Served) -> None:
    with gateway.http(None) as client:
        assert client.post("/v1/feedback", json={}).status_code == 401
    with gateway.http() as client:
        assert client.get("/v1/feedback").status_code == 405
        reply = client.post("/v1/feedback", json={"request_id": ID})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rating")
    assert gateway.fake.records == []
