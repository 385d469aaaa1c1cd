"""``Idempotency-Key``: a request that is sent again is answered again, not carried out again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.access import idempotency
from controlplane.access.models import ApiKey, IdempotentRequest
from controlplane.api import endpoints as endpoint_views
from controlplane.endpoints import services
from controlplane.endpoints.models import Endpoint
from inference.queue import Queue
from tests.factories import hold_ready, make_control_token, make_endpoint, make_version

pytestmark = pytest.mark.django_db

PROMOTE = "/api/v1/endpoints/chat/promote"
BODY = {"version": "tiny/2", "reason": "better"}


@pytest.fixture
def engineer(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Somebody who may promote tiny/2 on chat, which is ready."""
    monkeypatch.setattr(endpoint_views, "connection", lambda: queue)
    make_endpoint("chat", live=make_version())
    make_version()
    hold_ready(queue, "chat", "tiny/1", "tiny/2")
    return Client(headers={"authorization": f"Bearer {make_control_token('engineer')}"})


def send(client: Client, key: str, body: dict[str, Any], path: str = PROMOTE) -> Any:
    headers = {"idempotency-key": key}
    return client.post(path, data=body, content_type="application/json", headers=headers)


def test_a_repeat_is_given_the_first_answer_and_says_so(engineer: Client) -> None:
    first = send(engineer, "k1", BODY)
    send(engineer, "k2", {"from": "tiny/2"}, "/api/v1/endpoints/chat/rollback")
    again = send(engineer, "k1", BODY)
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert Endpoint.objects.get().live.name == "tiny/1", "the repeat must change nothing"


def test_a_repeat_of_a_creation_still_says_where_it_is(engineer: Client) -> None:
    body = {"name": "search", "live": "tiny/1"}
    first = send(engineer, "k1", body, "/api/v1/endpoints")
    again = send(engineer, "k1", body, "/api/v1/endpoints")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.headers["Location"] == first.headers["Location"]


@pytest.mark.parametrize(
    ("body", "path"),
    [(BODY | {"reason": "worse"}, PROMOTE), (BODY, "/api/v1/endpoints/other/promote")],
)
def test_another_request_under_the_key_is_refused(
    engineer: Client, body: dict[str, Any], path: str
) -> None:
    send(engineer, "k1", BODY)
    problem = send(engineer, "k1", body, path)
    assert (problem.status_code, problem.json()["code"]) == (422, "idempotency_key_reused")


def test_keys_belong_to_who_sends_them(engineer: Client) -> None:
    send(engineer, "k1", BODY)
    other = Client(headers={"authorization": f"Bearer {make_control_token('engineer')}"})
    assert "Idempotent-Replayed" not in send(other, "k1", BODY).headers


def test_while_the_first_is_answered_a_repeat_waits(engineer: Client) -> None:
    digest = idempotency.digest_request("POST", PROMOTE, BODY)
    caller = ApiKey.objects.get(role="engineer")
    idempotency.begin(caller=caller, key="k1", digest=digest, now=timezone.now())
    problem = send(engineer, "k1", BODY)
    assert (problem.status_code, problem.json()["code"]) == (409, "request_in_progress")
    assert problem.headers["Retry-After"] == "1"
    IdempotentRequest.objects.update(created_at=timezone.now() - timedelta(seconds=61))
    assert send(engineer, "k1", BODY).status_code == 200, "its process died"


def test_a_refusal_keeps_no_key(engineer: Client) -> None:
    body = BODY | {"expected_generation": 9}
    assert send(engineer, "k1", body).status_code == 409
    assert not IdempotentRequest.objects.exists()
    assert send(engineer, "k1", BODY).status_code == 200


def test_a_failure_that_nobody_foresaw_keeps_no_key(
    engineer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(**_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(services, "promote", break_down)
        with pytest.raises(ZeroDivisionError):
            send(engineer, "k1", BODY)
    assert send(engineer, "k1", BODY).status_code == 200


def test_who_may_not_change_holds_no_key(engineer: Client) -> None:
    viewer = Client(headers={"authorization": f"Bearer {make_control_token()}"})
    assert send(viewer, "k1", BODY).status_code == 403
    assert not IdempotentRequest.objects.exists()


@pytest.mark.parametrize("key", ["", "x" * 129, "a\tb"])
def test_a_key_that_cannot_be_is_refused(engineer: Client, key: str) -> None:
    problem = send(engineer, key, BODY)
    assert (problem.status_code, problem.json()["code"]) == (400, "invalid_idempotency_key")


def test_answers_are_kept_for_a_day(engineer: Client) -> None:
    send(engineer, "k1", BODY)
    now = timezone.now()
    assert idempotency.expire(now=now + timedelta(hours=23)) == 0
    assert idempotency.expire(now=now + timedelta(hours=25)) == 1
