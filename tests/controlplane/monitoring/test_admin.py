"""The usage page of the admin: sums by version, key or endpoint, for whoever may see the request log."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.access import services as access
from controlplane.monitoring.models import RequestLog
from tests.factories import make_log_row

pytestmark = pytest.mark.django_db


def log_in(role: str = "") -> Client:
    """A person of the staff, in the group of a role."""
    person = User.objects.create_user(f"{role}-person", password="x", is_staff=True)
    if role:
        person.groups.add(Group.objects.get_or_create(name=role)[0])
    client = Client()
    client.force_login(person, backend="django.contrib.auth.backends.ModelBackend")
    return client


def read(client: Client, query: str = "", status: int = 200) -> str:
    response = client.get(reverse("admin:monitoring_usage") + query)
    assert response.status_code == status
    return " ".join(response.content.decode().split())


def make_answer(**fields: Any) -> RequestLog:
    values: dict[str, Any] = {
        "finished_at": timezone.now() - timedelta(minutes=5),
        "completion_tokens": 250,
        "engine_s": 5.0,
    }
    return make_log_row(**values | fields)


def test_versions_are_listed_with_engine_seconds_where_no_price_is_set() -> None:
    make_answer(version="tiny/1")
    make_answer(version="tiny/2", engine_s=1.0)
    make_answer(version="tiny/2", outcome="cancelled", engine_s=None)
    text = read(log_in("viewer"))
    assert "<strong>tiny/1</strong>" in text
    assert "<td>20.00 s</td>" in text  # of engine time per 1,000 tokens
    assert "1 without an answer" in text
    assert "TATKAL_COST_PER_HOUR is not set" in text


def test_with_a_price_the_page_tells_cost(settings: Any) -> None:
    settings.COST_PER_HOUR = 7.2
    make_answer()
    text = read(log_in("viewer"))
    assert "<td>0.04000</td>" in text  # 20 engine seconds at 0.002
    assert "<td>0.0100</td>" in text
    assert "TATKAL_COST_PER_HOUR" not in text


def test_keys_are_called_by_their_names_and_windows_chosen() -> None:
    now = timezone.now()
    key = access.issue(name="shop", kind="inference", actor="ada", now=now).key
    make_answer(key_id=key.key_id)
    make_answer(key_id="gone", finished_at=now - timedelta(hours=3))
    viewer = log_in("viewer")
    day, hour = read(viewer, "?group_by=key"), read(viewer, "?group_by=key&window=hour")
    assert "<strong>shop</strong>" in day
    assert "<strong>gone</strong>" in day
    assert "<strong>gone</strong>" not in hour


def test_an_address_that_was_made_up_shows_the_day_by_version() -> None:
    make_answer()
    assert "<strong>tiny/1</strong>" in read(log_in("viewer"), "?group_by=user&window=year")


def test_who_may_not_see_the_log_may_not_see_its_sums() -> None:
    read(log_in(), status=403)


def test_the_log_shows_what_a_request_took_of_the_engine() -> None:
    make_answer(engine_s=0.0125, prompt_tokens=30, cached_tokens=16)
    response = log_in("viewer").get(reverse("admin:monitoring_requestlog_changelist"))
    text = response.content.decode()
    assert "12.5" in text
    assert "30 (16 cached), 250" in text
