"""GET /api/v1/usage: groups, windows, prices and refusals."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from tests.factories import make_control_token, make_log_row

pytestmark = pytest.mark.django_db


def get(path: str, status: int = 200) -> Any:
    """What a viewer reads."""
    client = Client(headers={"authorization": f"Bearer {make_control_token()}"})
    response = client.get(f"/api/v1/usage{path}")
    assert response.status_code == status, response.content
    return response.json()


@pytest.fixture
def traffic() -> None:
    """Two versions a minute ago, and an answer of two days ago."""
    now = timezone.now()
    for version, engine_s in (("tiny/1", 4.0), ("tiny/2", 1.0)):
        for _ in range(2):
            make_log_row(
                version=version,
                key_id="k1",
                completion_tokens=100,
                engine_s=engine_s,
                total_s=1.5,
                finished_at=now - timedelta(minutes=1),
            )
    make_log_row(version="tiny/0", finished_at=now - timedelta(days=2))


@pytest.mark.usefixtures("traffic")
def test_two_versions_stand_side_by_side_with_speed_times_and_cost(settings: Any) -> None:
    settings.COST_PER_HOUR = 3.6
    page = get("?group_by=version")
    assert page["price_per_hour"] == 3.6
    rows = {row["name"]: row for row in page["results"]}
    assert rows.keys() == {"tiny/1", "tiny/2"}
    assert [rows[name]["tokens_per_s"] for name in ("tiny/1", "tiny/2")] == [25.0, 100.0]
    costs = [rows[name]["cost_per_1k_tokens"] for name in ("tiny/1", "tiny/2")]
    assert costs == [pytest.approx(0.04), pytest.approx(0.01)]
    assert rows["tiny/1"]["total_s"] == {"n": 2, "p50": 1.5, "p99": None}


@pytest.mark.usefixtures("traffic")
def test_without_a_price_cost_is_null_and_seconds_are_told() -> None:
    row = get("?group_by=key")["results"][0]
    assert (row["name"], row["num_requests"], row["engine_s"]) == ("k1", 4, 10.0)
    assert (row["cost"], row["cost_per_1k_tokens"]) == (None, None)
    assert row["engine_s_per_1k_tokens"] == 25.0


@pytest.mark.usefixtures("traffic")
def test_the_window_is_the_last_day_unless_one_is_asked_for() -> None:
    assert [row["num_requests"] for row in get("?group_by=endpoint")["results"]] == [4]
    since = (timezone.now() - timedelta(days=3)).isoformat().replace("+00:00", "Z")
    assert [row["num_requests"] for row in get(f"?group_by=endpoint&since={since}")["results"]] == [
        5
    ]


@pytest.mark.parametrize(
    ("query", "parameter"), [("?group_by=user", "group_by"), ("?since=noon", "since")]
)
def test_what_cannot_be_asked_for_is_named(query: str, parameter: str) -> None:
    problem = get(query, 400)
    assert problem["code"] == "invalid"
    assert list(problem["errors"]) == [parameter]
