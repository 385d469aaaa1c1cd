"""POST /api/v1/plan: the reference figures over HTTP, and refusals that name the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from controlplane.endpoints import capacity
from controlplane.endpoints.models import Endpoint
from tests.controlplane.small_artifact import make_planned_version
from tests.factories import make_control_token, make_endpoint

pytestmark = pytest.mark.django_db
QUESTION = {"hardware": "a100-40gb", "params": 7e9, "num_layers": 32, "hidden_size": 4096}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> None:
    """A home in which nothing was measured yet."""
    settings.TATKAL_HOME = tmp_path


def send(body: Any, status: int = 200, role: str = "viewer") -> Any:
    client = Client(headers={"authorization": f"Bearer {make_control_token(role)}"})
    response = client.post("/api/v1/plan", data=body, content_type="application/json")
    assert response.status_code == status, response.content
    return response.json()


def test_the_reference_figures_come_out() -> None:
    plan = send({**QUESTION, "context": 2048, "weights": "fp16", "with_standby": True})
    assert plan["sequences"] == 26
    assert round(plan["ridge"], 1) == 200.6
    assert round(plan["free_bytes"] / 1e9, 2) == 28.95
    assert round(plan["decode_floor_s"] * 1e3, 1) == 9.0
    assert plan["kv_bytes_per_token"] == 524_288
    assert plan["standby"]["sequences"] == 13
    assert {row["weights"] for row in plan["what_ifs"]} == {"fp16", "int8", "int4"}


def test_lengths_are_batched() -> None:
    batching = send({**QUESTION, "lengths": [4, 10, 14, 16]})["batching"]
    assert (batching["wasted_slot_steps"], batching["waste"]) == (20, 0.3125)


def test_replicas_are_counted_for_a_load() -> None:
    plan = send({**QUESTION, "rate": 20, "ttft_s": 0.3, "tpot_s": 0.03})
    assert plan["service"]["replicas"] >= 1
    assert plan["queue_model"].startswith("M/G/c")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hardware": "a1000"}, "hardware"),
        ({"num_kv_heads": 5}, "num_kv_heads"),
        ({"headroom": 0.5}, "headroom"),
        ({"weights": "fp5"}, "weights"),
        ({"params": "many"}, "params"),
        ({"params": 0}, "params"),
        ({"layers": 32}, "layers"),
        ({"lengths": [0]}, "lengths"),
        ({"rate": 5, "ttft_s": 1.0, "tpot_s": 0.001}, "tpot_s"),
    ],
)
def test_a_value_that_cannot_be_is_a_problem_that_names_it(
    changes: dict[str, Any], name: str
) -> None:
    problem = send({**QUESTION, **changes}, status=400)
    assert name in problem["errors"]
    assert problem["retryable"] is False


def test_a_stranger_is_refused(client: Client) -> None:
    response = client.post("/api/v1/plan", data=QUESTION, content_type="application/json")
    assert response.status_code == 401


def test_the_schema_describes_it(client: Client) -> None:
    client = Client(headers={"authorization": f"Bearer {make_control_token()}"})
    schema = client.get("/api/v1/schema?format=json").json()
    operation = schema["paths"]["/api/v1/plan"]["post"]
    assert "sequences" in schema["components"]["schemas"]["PlanAnswer"]["properties"]
    assert operation["operationId"] == "plan"


def test_a_candidate_that_does_not_fit_is_a_conflict_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_planned_version(tmp_path, model="big")
    make_endpoint("chat")
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2**30)
    client = Client(headers={"authorization": f"Bearer {make_control_token('engineer')}"})
    response = client.patch(
        "/api/v1/endpoints/chat", data={"candidate": version.name}, content_type="application/json"
    )
    problem = response.json()
    assert (response.status_code, problem["code"]) == (409, "does_not_fit")
    assert problem["fit"]["available_bytes"] == 2**30
    assert "big/1 needs" in problem["detail"]
    assert Endpoint.objects.get(name="chat").candidate is None
