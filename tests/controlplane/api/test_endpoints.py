"""Moving routes over HTTP: who may, what is answered, and what a refusal tells."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client

from controlplane.api import endpoints as endpoint_views
from controlplane.api import slots as slot_views
from controlplane.endpoints import publication, services
from controlplane.endpoints.models import Endpoint
from controlplane.events.models import Event
from inference.queue import Queue
from tests.factories import (
    NOW,
    TELEMETRY,
    hold_ready,
    make_control_token,
    make_endpoint,
    make_version,
)

pytestmark = pytest.mark.django_db

CHAT = "/api/v1/endpoints/chat"


@pytest.fixture(autouse=True)
def connected(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The views' Redis is that of this test: tiny/2 is live on chat, tiny/1 and tiny/3 are ready."""
    for module in (endpoint_views, slot_views):
        monkeypatch.setattr(module, "connection", lambda: queue)
    first, second = make_version(), make_version()
    make_version()
    make_endpoint("chat", live=second, previous=first)
    publication.publish(name="chat", queue=queue, now=NOW)
    hold_ready(queue, "chat", "tiny/1", "tiny/2", "tiny/3")
    return queue


@pytest.fixture
def engineer() -> Client:
    """Somebody who may change routes."""
    return Client(headers={"authorization": f"Bearer {make_control_token('engineer')}"})


def send(
    client: Client, path: str, body: Any, status: int = 200, method: str = "post", **headers: str
) -> Any:
    response = getattr(client, method)(
        path, data=body, content_type="application/json", headers=headers
    )
    assert response.status_code == status, response.content
    return response.json()


@pytest.mark.parametrize("role", ["viewer", "engineer", "approver"])
def test_engineers_and_approvers_move_routes_and_viewers_look(role: str) -> None:
    client = Client(headers={"authorization": f"Bearer {make_control_token(role)}"})
    may = role != "viewer"
    send(client, CHAT, {"queue_cap": 9}, 200 if may else 403, "patch")
    body = {"version": "tiny/3", "reason": "better"}
    send(client, f"{CHAT}/promote", body, 200 if may else 403)
    send(client, f"{CHAT}/rollback", {}, 200 if may else 403)
    new = {"name": "search", "live": "tiny/1"}
    send(client, "/api/v1/endpoints", new, 201 if may else 403)
    for path in (CHAT, "/api/v1/endpoints", "/api/v1/slots"):
        assert client.get(path).status_code == 200
    actors = set(Event.objects.exclude(actor="ada").values_list("actor", flat=True))
    assert len(actors) == may


def test_a_promote_answers_when_the_route_is_applied(engineer: Client, queue: Queue) -> None:
    done = send(engineer, f"{CHAT}/promote", {"version": "tiny/3", "reason": "better"})
    route = queue.read_route("chat")
    assert route is not None
    assert route.live == done["live"] == "tiny/3"
    assert 0 < done.pop("applied_in_ms") < 1000
    assert done == {
        "generation": 2,
        "live": "tiny/3",
        "previous": "tiny/2",
        "changed": True,
        "published": True,
        "requeued": 0,
        "in_flight": 0,
    }


def test_a_rollback_needs_no_body_and_a_repeat_is_told_the_state(engineer: Client) -> None:
    done = engineer.generic("POST", f"{CHAT}/rollback")
    assert done.status_code == 200
    assert (done.json()["live"], done.json()["previous"]) == ("tiny/1", None)
    for body in ({}, {"from": "tiny/2"}):
        again = send(engineer, f"{CHAT}/rollback", body)
        assert (again["live"], again["changed"], again["generation"]) == ("tiny/1", False, 2)


def test_a_refusal_tells_the_state_it_met(engineer: Client) -> None:
    body = {"version": "tiny/3", "reason": "better", "expected_generation": 9}
    problem = send(engineer, f"{CHAT}/promote", body, 409)
    assert (problem["code"], problem["retryable"]) == ("stale_generation", False)
    assert problem["current"] == {
        "generation": 1,
        "live": "tiny/2",
        "previous": "tiny/1",
        "candidate": None,
        "retired": None,
        "canary_bp": 0,
    }


def test_a_version_that_is_not_resident_is_refused_with_what_is_missing(engineer: Client) -> None:
    make_version()
    body = {"version": "tiny/4", "reason": "better"}
    problem = send(engineer, f"{CHAT}/promote", body, 409)
    assert (problem["code"], problem["retryable"]) == ("version_not_resident", True)
    assert "make it the candidate first" in problem["missing"]


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        (f"{CHAT}/promote", "post", {"version": "tiny/3", "reason": "x"}),
        (f"{CHAT}/rollback", "post", {}),
        (CHAT, "patch", {"queue_cap": 9}),
        ("/api/v1/endpoints", "post", {"name": "search", "live": "tiny/1"}),
    ],
)
def test_a_field_that_nobody_would_read_is_refused_by_name(
    engineer: Client, path: str, method: str, body: dict[str, Any]
) -> None:
    problem = send(engineer, path, body | {"expected_genration": 1}, 400, method)
    assert list(problem["errors"]) == ["expected_genration"]
    assert Endpoint.objects.get().generation == 1


@pytest.mark.parametrize(("field", "value"), [("deadline_s", 3601), ("standby_s", 10**12)])
def test_a_time_that_is_too_long_is_refused_by_name(
    engineer: Client, field: str, value: int
) -> None:
    new = {"name": "search", "live": "tiny/1"}
    for path, body, method in ((CHAT, {}, "patch"), ("/api/v1/endpoints", new, "post")):
        problem = send(engineer, path, body | {field: value}, 400, method)
        assert "less than or equal to" in str(problem["errors"][field])


def test_a_candidate_is_set_shared_and_let_go(engineer: Client) -> None:
    shown = send(engineer, CHAT, {"candidate": "tiny/3", "canary_bp": 250}, 200, "patch")
    assert (shown["candidate"], shown["canary_bp"], shown["generation"]) == ("tiny/3", 250, 2)
    shown = send(engineer, CHAT, {"queue_cap": 9}, 200, "patch")
    assert (shown["candidate"], shown["queue_cap"]) == ("tiny/3", 9)
    shown = send(engineer, CHAT, {"candidate": None}, 200, "patch")
    assert (shown["candidate"], shown["canary_bp"]) == (None, 0)


def test_an_endpoint_is_created_published_and_found(engineer: Client, queue: Queue) -> None:
    body = {"name": "search", "live": "tiny/1", "in_flight": "cut", "reason": "for the shop"}
    response = engineer.post("/api/v1/endpoints", data=body, content_type="application/json")
    assert response.status_code == 201
    shown = engineer.get(response.headers["Location"]).json()
    assert (shown["live"], shown["in_flight"], shown["is_published"]) == ("tiny/1", "cut", True)
    assert queue.read_route("search") is not None
    assert send(engineer, "/api/v1/endpoints", body, 409)["code"] == "endpoint_exists"


def test_an_endpoint_shows_roles_lanes_rejections_and_standby(engineer: Client) -> None:
    send(engineer, f"{CHAT}/rollback", {"reason": "rude"})
    shown = engineer.get(CHAT).json()
    assert [(role["role"], role["version"], role["is_ready"]) for role in shown["roles"]] == [
        ("live", "tiny/1", True),
        ("retired", "tiny/2", True),
    ]
    assert (shown["roles"][0]["queued"], shown["roles"][0]["in_flight"]) == (0, 0)
    assert [(each["version"], each["reason"]) for each in shown["rejections"]] == [
        ("tiny/2", "rude")
    ]
    assert (shown["retired"], shown["standby_s"]) == ("tiny/2", 3600)
    assert shown["retired_until"] > shown["updated_at"]


def test_slots_are_listed_with_what_they_hold(engineer: Client) -> None:
    rows = engineer.get("/api/v1/slots").json()["results"]
    assert [(row["version"], row["state"]) for row in rows] == [
        ("tiny/1", "ready"),
        ("tiny/2", "ready"),
        ("tiny/3", "ready"),
    ]
    assert {(row["kernel"], row["fingerprint"]) for row in rows} == {("instant", "f1")}
    assert rows[0]["telemetry"] == TELEMETRY


def test_with_redis_away_a_rollback_is_committed_and_the_rest_says_when_to_ask_again(
    engineer: Client, absent_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (endpoint_views, slot_views):
        monkeypatch.setattr(module, "connection", lambda: absent_queue)
    done = send(engineer, f"{CHAT}/rollback", {})
    assert (done["live"], done["published"], done["applied_in_ms"]) == ("tiny/1", False, None)
    assert done["requeued"] is None
    for response in (
        engineer.get("/api/v1/slots"),
        engineer.post(
            f"{CHAT}/promote",
            data={"version": "tiny/3", "reason": "x"},
            content_type="application/json",
        ),
    ):
        assert response.status_code == 503
        assert response.headers["Retry-After"]


def test_a_database_that_is_away_is_a_503_and_not_a_500(
    engineer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_away(**_: Any) -> None:
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(services, "rollback", be_away)
    response = engineer.generic("POST", f"{CHAT}/rollback")
    assert response.status_code == 503
    problem = response.json()
    assert (problem["code"], problem["retryable"]) == ("database_unavailable", True)
    assert response.headers["Retry-After"]


def test_the_schema_describes_the_moves(engineer: Client) -> None:
    response = engineer.get(
        "/api/v1/schema", headers={"accept": "application/vnd.oai.openapi+json"}
    )
    schema = response.json()
    operation = schema["paths"]["/api/v1/endpoints/{name}/rollback"]["post"]
    assert "Idempotency-Key" in {each["name"] for each in operation["parameters"]}
    fields = schema["components"]["schemas"]["RollbackRequest"]["properties"]
    assert set(fields) == {"from", "to", "reason", "force"}
    promotion = schema["components"]["schemas"]["PromotionRequest"]
    assert set(promotion["required"]) == {"version", "reason"}
    assert schema["paths"]["/api/v1/slots"]["get"]["responses"]["200"]
