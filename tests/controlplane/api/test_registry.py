"""Registering models and versions over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from controlplane.api import registry as views
from controlplane.events.models import Event
from controlplane.registry.models import Model, Version
from inference.protocol import Resident
from inference.queue import Queue
from inference.replicas import Member
from tests.factories import make_control_token, make_version

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def gguf(tmp_path: Path, settings: Any) -> str:
    """A file that could be a model, in the one allowed root."""
    settings.MODEL_ROOTS = (tmp_path,)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def engineer() -> Client:
    """Somebody who may register."""
    return Client(headers={"authorization": f"Bearer {make_control_token('engineer')}"})


def post(client: Client, path: str, body: Any, status: int = 201, *, key: str = "") -> Any:
    headers = {"idempotency-key": key} if key else {}
    response = client.post(path, body, content_type="application/json", headers=headers)
    assert response.status_code == status, response.content
    return response


def test_a_version_is_registered_and_followed_until_it_has_ended(
    engineer: Client, gguf: str
) -> None:
    parent = make_version(model="base")
    body = {
        "model": "tiny",
        "source_kind": "gguf",
        "source": gguf,
        "keep_quantized": True,
        "engine_options": {"max_num_seqs": 8},
        "parent": parent.name,
        "run_link": "https://mlflow.test/7",
        "notes": "Trained twice.",
        "description": "Better at trains.",
    }
    response = post(engineer, "/api/v1/versions", body)
    assert response.headers["Location"] == "/api/v1/versions/tiny/1"
    row = response.json()
    assert (row["name"], row["state"], row["import_progress"]) == ("tiny/1", "pending", None)
    assert row | body == row

    progress = {"done": 3, "total": 30, "what": "layer 3"}
    Version.objects.filter(model__name="tiny").update(state="importing", import_progress=progress)
    row = engineer.get("/api/v1/versions/tiny/1").json()
    assert (row["state"], row["import_progress"]) == ("importing", progress)

    reason = "broken_artifact: tiny.gguf: magic: this is no GGUF file. Download it again."
    Version.objects.filter(model__name="tiny").update(state="failed", state_reason=reason)
    row = engineer.get("/api/v1/versions/tiny/1").json()
    assert (row["state"], row["state_reason"]) == ("failed", reason)
    assert Event.objects.about("version:tiny/1").get().actor.startswith("ada")


def test_the_address_may_name_the_model(engineer: Client, gguf: str) -> None:
    body = {"source_kind": "gguf", "source": gguf}
    assert post(engineer, "/api/v1/models/tiny/versions", body).json()["name"] == "tiny/1"
    assert post(engineer, "/api/v1/models/tiny/versions", body).json()["name"] == "tiny/2"
    post(engineer, "/api/v1/models/other/versions", body)
    rows = engineer.get("/api/v1/models/tiny/versions").json()["results"]
    assert [row["name"] for row in rows] == ["tiny/2", "tiny/1"]
    assert engineer.get("/api/v1/models/nothing/versions").status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtpye": "float32"}, "dtpye"),
        ({"model": "Tiny"}, "model"),
        ({"source_kind": "onnx"}, "source_kind"),
        ({"source": "/etc/passwd"}, "source"),
        ({"source": None}, "source"),
        ({"dtype": "int3"}, "dtype"),
        ({"engine_options": {"block_sise": 1}}, "engine_options"),
        ({"engine_options": "many"}, "engine_options"),
        ({"runtime": {"torhc": "2"}}, "runtime"),
        ({"parent": "tiny/9"}, "parent"),
        ({"run_link": "file:///etc/passwd"}, "run_link"),
    ],
)
def test_a_refusal_names_the_field_and_nothing_is_made(
    engineer: Client, gguf: str, change: dict[str, Any], field: str
) -> None:
    body = {"model": "tiny", "source_kind": "gguf", "source": gguf} | change
    problem = post(engineer, "/api/v1/versions", body, 400).json()
    assert list(problem["errors"]) == [field]
    assert problem["code"] in ("invalid", "invalid_version")
    assert not Model.objects.exists()


def test_a_source_elsewhere_is_refused_with_the_root(engineer: Client, tmp_path: Path) -> None:
    body = {"model": "tiny", "source_kind": "gguf", "source": "/etc/passwd"}
    problem = post(engineer, "/api/v1/versions", body, 400).json()
    assert str(tmp_path) in problem["detail"]
    assert problem["code"] == "invalid_version"


def test_a_viewer_registers_nothing(gguf: str) -> None:
    viewer = Client(headers={"authorization": f"Bearer {make_control_token('viewer')}"})
    body = {"model": "tiny", "source_kind": "gguf", "source": gguf}
    for path in ("/api/v1/versions", "/api/v1/models", "/api/v1/models/tiny/versions"):
        assert post(viewer, path, body, 403).json()["code"] == "permission_denied"
    assert not Model.objects.exists()


def test_a_repeat_under_one_key_registers_once(engineer: Client, gguf: str) -> None:
    body = {"model": "tiny", "source_kind": "gguf", "source": gguf}
    first = post(engineer, "/api/v1/versions", body, key="job-7")
    second = post(engineer, "/api/v1/versions", body, key="job-7")
    assert second.json() == first.json()
    assert second.headers["Location"] == first.headers["Location"]
    assert Version.objects.count() == 1


def test_a_model_can_be_made_without_a_version(engineer: Client) -> None:
    response = post(engineer, "/api/v1/models", {"name": "chat", "description": "For talks."})
    assert response.headers["Location"] == "/api/v1/models/chat"
    assert engineer.get("/api/v1/models/chat").json()["description"] == "For talks."
    problem = post(engineer, "/api/v1/models", {"name": "chat"}, 409).json()
    assert problem["code"] == "model_exists"
    assert post(engineer, "/api/v1/models", {"name": "Chat"}, 400).json()["code"] == "invalid_model"
    assert list(post(engineer, "/api/v1/models", {"nmae": "x"}, 400).json()["errors"]) == ["nmae"]


def test_a_version_tells_how_slots_fail_to_load_it(
    engineer: Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "connection", lambda: queue)
    make_version()
    make_version()
    member = Member(queue, "engine-2", lease_ms=60_000)
    member.renew()
    tried = member.begin_load(Resident("chat", "tiny/2", "/artifacts/2"), 3)
    member.fail_load(tried, "NotEnoughMemory: it needs 9 GiB")

    row = engineer.get("/api/v1/versions/tiny/2").json()
    (failure,) = row["load_failures"]
    assert failure["failed_at"] < failure["retry_at"]
    assert failure == {
        "endpoint": "chat",
        "slot": "engine-2",
        "reason": "NotEnoughMemory: it needs 9 GiB",
        "tries": 3,
        "failed_at": failure["failed_at"],
        "retry_at": failure["retry_at"],
    }
    listed = engineer.get("/api/v1/versions").json()["results"]
    assert {each["name"]: each["load_failures"] for each in listed} == {
        "tiny/1": [],
        "tiny/2": [failure],
    }
    member.end_load(tried)
    assert engineer.get("/api/v1/versions/tiny/2").json()["load_failures"] == []


def test_with_redis_away_nobody_knows_how_loading_goes(
    engineer: Client, absent_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "connection", lambda: absent_queue)
    make_version()
    assert engineer.get("/api/v1/versions/tiny/1").json()["load_failures"] is None
