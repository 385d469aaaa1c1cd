"""The control API over HTTP: closed by default, readable, paged, and described."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.access import services as access
from controlplane.api import endpoints as endpoint_views
from controlplane.endpoints.slots import Report
from inference.queue import Queue
from inference.replicas import SlotState, SlotStatus
from tests.factories import (
    NOW,
    make_api_key,
    make_control_token,
    make_endpoint,
    make_log_row,
    make_version,
)

pytestmark = pytest.mark.django_db

METHODS = ("get", "head", "post", "put", "patch", "delete", "options")
PATHS = (
    "/api/v1/endpoints/chat/promote",
    "/api/v1/endpoints/chat/rollback",
    "/api/v1/slots",
    "/api/v1/dead-letters",
    "/api/v1/models",
    "/api/v1/models/tiny",
    "/api/v1/versions",
    "/api/v1/versions/tiny/1",
    "/api/v1/endpoints",
    "/api/v1/endpoints/chat",
    "/api/v1/keys",
    "/api/v1/requests",
    "/api/v1/schema",
    "/api/v1/nothing",
    "/api/v1/",
)


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> list[SlotStatus]:
    """What the slots report, in place of Redis."""
    reported: list[SlotStatus] = []
    monkeypatch.setattr(endpoint_views, "connection", lambda: None)
    monkeypatch.setattr(
        endpoint_views, "read_report", lambda queue, endpoints: Report(reported, {})
    )
    return reported


@pytest.fixture
def reader() -> Client:
    """Somebody with a viewer's token."""
    return Client(headers={"authorization": f"Bearer {make_control_token()}"})


def get(client: Client, path: str, status: int = 200) -> Any:
    response = client.get(path)
    assert response.status_code == status, response.content
    return response.json()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_open_without_a_token(path: str, method: str) -> None:
    response = getattr(Client(), method)(path)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"].startswith("Bearer")
    assert response.headers["Content-Type"] == "application/problem+json"


def test_no_other_secret_opens_it(admin_client: Client) -> None:
    expired = access.issue(
        name="x",
        kind="control",
        role="approver",
        actor="ada",
        now=NOW,
        expires_at=NOW + timedelta(seconds=1),
    ).clear_text
    for value in (
        f"Bearer {make_api_key()}",
        f"Bearer {expired}",
        f"Basic {make_control_token()}",
        f"Bearer {make_control_token()}x",
        "Bearer ",
        "Bearer ' OR 1=1 --",
    ):
        assert Client(headers={"authorization": value}).get("/api/v1/models").status_code == 401
    assert admin_client.get("/api/v1/models").status_code == 401, "cookies must open nothing"


@pytest.mark.parametrize("path", PATHS[:-2])
@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_a_viewer_changes_nothing(reader: Client, path: str, method: str) -> None:
    assert getattr(reader, method)(path).status_code == 403


def test_an_unknown_address_is_a_problem_with_a_way_on(reader: Client) -> None:
    problem = get(reader, "/api/v1/nothing", 404)
    assert problem == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "There is no /api/v1/nothing; see /api/v1/schema.",
        "code": "not_found",
        "retryable": False,
    }


def test_models_and_versions_are_read_by_name(reader: Client) -> None:
    make_version(weights_digest="abc")
    make_version(state="pending")
    assert [row["name"] for row in get(reader, "/api/v1/models")["results"]] == ["tiny"]
    assert get(reader, "/api/v1/models/tiny")["name"] == "tiny"
    names = [row["name"] for row in get(reader, "/api/v1/versions")["results"]]
    assert names == ["tiny/2", "tiny/1"]
    assert get(reader, "/api/v1/versions/tiny/1")["weights_digest"] == "abc"
    assert get(reader, "/api/v1/versions/tiny/9", 404)["code"] == "not_found"


def test_versions_are_narrowed_by_model_and_state(reader: Client) -> None:
    make_version()
    make_version(model="other", state="pending")
    for query, expected in (("model=other", ["other/1"]), ("state=ready", ["tiny/1"])):
        rows = get(reader, f"/api/v1/versions?{query}")["results"]
        assert [row["name"] for row in rows] == expected


def test_an_endpoint_shows_its_roles_and_who_serves_them(
    reader: Client, slots: list[SlotStatus]
) -> None:
    make_endpoint("chat", candidate=make_version(), canary_bp=500)
    loading = SlotStatus("engine-0", "chat", "tiny/2", SlotState.WARMING, "3 of 30 layers")
    slots.append(replace(loading, fingerprint="f1", kernel="torch, bfloat16, threads 1"))
    row = get(reader, "/api/v1/endpoints/chat")
    assert (row["live"], row["previous"], row["candidate"]) == ("tiny/2", None, "tiny/1")
    assert row["canary_bp"] == 500
    assert row["is_published"] is False
    assert [(role["role"], role["is_ready"]) for role in row["roles"]] == [
        ("live", False),
        ("candidate", False),
    ]
    assert row["roles"][0]["slots"] == [
        {
            "slot": "engine-0",
            "state": "warming",
            "detail": "3 of 30 layers",
            "kernel": "torch, bfloat16, threads 1",
            "fingerprint": "f1",
        }
    ]


def test_with_redis_away_endpoints_are_shown_and_roles_unknown(
    reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(endpoint_views, "connection", lambda: Queue("redis://127.0.0.1:1/0"))
    make_endpoint("chat")
    row = get(reader, "/api/v1/endpoints")["results"][0]
    assert row["live"] == "tiny/1"
    assert row["roles"] is None


def test_keys_are_listed_without_anything_that_opens(reader: Client) -> None:
    secret = make_api_key()
    text = reader.get("/api/v1/keys").content.decode()
    assert secret[-4:] in text
    assert secret.split("-", 3)[3] not in text
    assert "digest" not in text
    states = {row["name"]: row["state"] for row in get(reader, "/api/v1/keys")["results"]}
    assert states == {"ada": "active", "shop": "active"}


def test_the_log_comes_in_pages_that_stay_put_while_lines_are_added(reader: Client) -> None:
    for number in range(5):
        make_log_row(request_id=f"r{number}")
    first = get(reader, "/api/v1/requests?page_size=3")
    make_log_row(request_id="r5")
    second = get(reader, first["next"])
    assert [row["id"] for row in first["results"]] == ["r4", "r3", "r2"]
    assert [row["id"] for row in second["results"]] == ["r1", "r0"]
    assert second["next"] is None


def test_the_log_is_narrowed_and_shows_no_texts(reader: Client) -> None:
    make_log_row(request_id="old", finished_at=NOW - timedelta(hours=2))
    make_log_row(request_id="bad", outcome="slot_lost", prompt="my secret")
    make_log_row(request_id="good")
    since = (NOW - timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    path = f"/api/v1/requests?endpoint=chat&outcome=slot_lost&since={since}"
    assert [row["id"] for row in get(reader, path)["results"]] == ["bad"]
    assert b"my secret" not in reader.get("/api/v1/requests").content


def test_a_malformed_filter_names_the_parameter(reader: Client) -> None:
    problem = get(reader, "/api/v1/requests?since=yesterday", 400)
    assert problem["code"] == "invalid"
    assert list(problem["errors"]) == ["since"]


def test_the_schema_describes_every_resource_its_errors_and_the_token(reader: Client) -> None:
    response = reader.get("/api/v1/schema", headers={"accept": "application/vnd.oai.openapi+json"})
    schema = response.json()
    described = {path.replace("{name}", "x") for path in schema["paths"]}
    assert {"/api/v1/models", "/api/v1/requests", "/api/v1/endpoints/x"} <= described
    assert schema["components"]["securitySchemes"]["controlToken"]["scheme"] == "bearer"
    answers = schema["paths"]["/api/v1/models"]["get"]["responses"]
    assert "application/problem+json" in answers["default"]["content"]
    roles = schema["components"]["schemas"]["Endpoint"]["properties"]["roles"]
    assert roles["type"] == "array"
    assert roles["nullable"] is True


def test_a_host_that_was_not_named_is_refused() -> None:
    client = Client(headers={"host": "evil.test"})
    for method in METHODS:
        assert getattr(client, method)("/api/v1/models").status_code == 400


def test_the_front_door_leads_to_the_admin(client: Client) -> None:
    response = client.get("/")
    assert response.status_code == 302
    assert response.headers["Location"] == "/admin/"


def test_a_key_expires_by_the_clock_of_the_server(reader: Client) -> None:
    access.issue(
        name="short",
        kind="inference",
        actor="ada",
        now=timezone.now() - timedelta(hours=2),
        expires_at=timezone.now() - timedelta(hours=1),
    )
    states = {row["name"]: row["state"] for row in get(reader, "/api/v1/keys")["results"]}
    assert states["short"] == "expired"
