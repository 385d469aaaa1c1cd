"""Policies over HTTP: saved in versions, refused with the field, the value and the mend; and the schema of it all."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from controlplane.rollouts.models import Policy
from controlplane.rollouts.presets import PRESETS
from tests.controlplane.rollouts.world import DOCUMENT
from tests.factories import make_control_token

pytestmark = pytest.mark.django_db

POLICIES = "/api/v1/policies"


@pytest.fixture
def engineer() -> Client:
    return Client(headers={"authorization": f"Bearer {make_control_token('engineer')}"})


def send(client: Client, path: str, body: Any, status: int, method: str = "post") -> Any:
    response = getattr(client, method)(path, data=body, content_type="application/json")
    assert response.status_code == status, response.content
    return response


def test_a_changed_document_is_the_next_version_and_the_same_adds_none(engineer: Client) -> None:
    body = {"name": "ours", "document": DOCUMENT, "description": "as agreed"}
    first = send(engineer, POLICIES, body, 201)
    assert first.headers["Location"] == f"{POLICIES}/ours/1"
    assert send(engineer, POLICIES, body, 200).json()["id"] == "ours/1"
    changed = {"document": {**DOCUMENT, "alpha": 0.01}}
    second = send(engineer, f"{POLICIES}/ours", changed, 201, "put").json()
    assert (second["id"], second["document"]["alpha"]) == ("ours/2", 0.01)
    assert engineer.get(f"{POLICIES}/ours").json() == second
    assert engineer.get(f"{POLICIES}/ours/1").json() == first.json()
    rows = engineer.get(f"{POLICIES}?name=ours").json()["results"]
    assert [row["id"] for row in rows] == ["ours/2", "ours/1"]
    assert engineer.get(f"{POLICIES}/ours/3").status_code == 404


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"alfa": 0.1}, "policy.alfa is unknown: use alpha"),
        ({"alpha": 2}, "policy.alpha=2 must be a number between 0 and 0.5"),
        ({"steps": [{"type": "canary"}]}, "steps[0].bp is missing: say how many"),
        ({"steps": []}, "steps is empty"),
        (
            {"metrics": {"tone": {"kind": "flags", "flags": ["rude"], "modes": ["shadow"]}}},
            "metrics.tone.flags: 'rude' is no flag: use ",
        ),
        ({"segments": {"keys": ["colour"]}}, "segments.keys: 'colour' is no key of segments: use "),
        (
            {"traffic": [{"segment": {"lang": "hi"}, "per_hour": 0.1}]},
            "the deadline is 168 hours. Raise the share or the margin, or merge the segment.",
        ),
    ],
)
def test_what_could_guide_no_rollout_is_refused_with_field_value_and_mend(
    engineer: Client, change: dict[str, Any], told: str
) -> None:
    body = {"name": "ours", "document": DOCUMENT | change}
    problem = send(engineer, POLICIES, body, 422).json()
    assert (problem["code"], problem["retryable"]) == ("invalid_policy", False)
    assert told in problem["detail"]
    assert not Policy.objects.exists()


def test_a_name_that_cannot_be_is_refused(engineer: Client) -> None:
    body = {"name": "Our policy", "document": DOCUMENT}
    assert "Our policy" in send(engineer, POLICIES, body, 422).json()["detail"]
    assert send(engineer, POLICIES, {"document": DOCUMENT}, 400).json()["errors"].keys() == {"name"}


def test_presets_are_listed_and_can_be_saved_as_they_are(engineer: Client) -> None:
    presets = engineer.get("/api/v1/policy-presets").json()["results"]
    assert {each["name"]: each["document"] for each in presets} == PRESETS
    for each in presets:
        send(engineer, f"{POLICIES}/mine", {"document": each["document"]}, 201, "put")
    assert engineer.get(f"{POLICIES}/careful").status_code == 404
    assert not Policy.objects.filter(name="careful").exists()


def test_viewers_read_and_nobody_deletes(engineer: Client) -> None:
    send(engineer, POLICIES, {"name": "ours", "document": DOCUMENT}, 201)
    viewer = Client(headers={"authorization": f"Bearer {make_control_token('viewer')}"})
    for path in (POLICIES, f"{POLICIES}/ours", f"{POLICIES}/ours/1", "/api/v1/policy-presets"):
        assert viewer.get(path).status_code == 200
    send(viewer, POLICIES, {"name": "theirs", "document": DOCUMENT}, 403)
    send(viewer, f"{POLICIES}/ours", {"document": DOCUMENT | {"alpha": 0.01}}, 403, "put")
    assert engineer.delete(f"{POLICIES}/ours").status_code == 405
    assert Policy.objects.count() == 1


def test_the_schema_is_valid_and_names_every_action(tmp_path: Any) -> None:
    path = tmp_path / "schema.yml"
    call_command("spectacular", "--validate", "--fail-on-warn", "--file", str(path))
    text = path.read_text()
    for action in (
        *("pause", "resume", "approve", "promote", "abort", "rollback", "retry", "set-weight"),
        *("timeline", "segments", "copies", "pairs"),
    ):
        assert f"/api/v1/rollouts/{{rollout}}/{action}:" in text
    assert "/api/v1/policies/{name}/{number}:" in text
