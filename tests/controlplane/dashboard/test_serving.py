"""The planner's page: defaults, answers, refusals beside their field, live slots, and a version that cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from controlplane.dashboard import serving
from controlplane.dashboard.serving import live_points
from controlplane.endpoints import capacity
from controlplane.endpoints.slots import Report
from inference.calibration import CALIBRATION, write_calibration, write_steps
from inference.replicas import SlotState, SlotStatus
from tests.controlplane.small_artifact import make_planned_version
from tests.inference.planner import reference

pytestmark = pytest.mark.django_db
BUSY = {
    "intensity": 6.25, "flops_per_s": 41.5e9, "bytes_per_s": 6.6e9, "batch_rows": 7.4, "tokens_per_s": 148.0,
    "mbu": 0.41, "mfu": None,
}  # fmt: skip
IDLE: dict[str, float | None] = dict.fromkeys(BUSY)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which nothing was measured yet, and no slots."""
    settings.TATKAL_HOME = tmp_path
    monkeypatch.setattr(serving, "look", lambda: None)
    return tmp_path


def page(client: Client, **inputs: Any) -> str:
    response = client.get(reverse("dashboard:planner"), inputs)
    assert response.status_code == 200
    return response.content.decode()


def test_the_page_opens_with_the_reference_plan(admin_client: Client) -> None:
    shown = page(admin_client)
    for part in ("<strong>26</strong>", "28.95 GB", "9.003 ms", "200.6 FLOP/byte", "ridge 200.6"):
        assert part in shown
    assert "manage.py plan --calibrate" in shown
    assert "<script>" not in shown.split('id="content"')[-1]


def test_the_drawing_has_a_name_and_a_table_that_says_the_same(admin_client: Client) -> None:
    shown = page(admin_client)
    assert 'role="img" aria-labelledby="roofline-title" aria-describedby="roofline-table"' in shown
    assert '<title id="roofline-title">Roofline of NVIDIA A100 40 GB</title>' in shown
    assert 'id="roofline-table"' in shown


def test_a_version_and_a_load_are_planned(admin_client: Client, tmp_path: Path) -> None:
    version = make_planned_version(tmp_path)
    shown = page(
        admin_client,
        hardware="l4",
        version=version.name,
        params="7e9",
        rate=1,
        ttft_s=1,
        tpot_s=0.1,
    )
    assert "in bf16" in shown
    assert "Replicas" in shown


def test_a_value_that_cannot_be_is_told_beside_its_field(admin_client: Client) -> None:
    shown = page(
        admin_client, hardware="l4", params="7e9", num_layers=32, hidden_size=4096, num_kv_heads=5
    )
    assert "num_kv_heads=5 must divide num_heads=32" in shown
    assert "What fits" not in shown
    assert "20" in page(admin_client, hardware="l4", headroom_percent=30)


def test_slots_that_compute_are_drawn_and_idle_ones_are_not(
    admin_client: Client, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_calibration(home, reference.CALIBRATION)
    slots = [
        SlotStatus("slot-1", "chat", "tiny/1", SlotState.READY, telemetry=BUSY),
        SlotStatus("slot-2", "chat", "tiny/2", SlotState.READY, telemetry=IDLE),
        SlotStatus("slot-3", "chat", "tiny/3", SlotState.READY),
    ]
    assert [point.slot for point in live_points(slots)] == ["slot-1"]
    monkeypatch.setattr(serving, "look", lambda: Report(slots=slots))
    shown = page(admin_client)
    assert 'class="other-roof"' in shown
    assert "7.4 rows a step, 148 tokens/s, MBU 41 %, MFU -" in shown
    assert "slot-2" not in shown


def test_measured_steps_are_drawn_beside_their_floor(admin_client: Client, home: Path) -> None:
    write_steps(home, [reference.CURVE])
    assert "Decode steps against their floor" not in page(admin_client)
    write_calibration(home, reference.CALIBRATION)
    shown = page(admin_client)
    assert "Decode steps against their floor" in shown
    assert "measured 2026-01-02T03:04:05+00:00" in shown


def test_a_damaged_calibration_is_told_and_the_page_opens(admin_client: Client, home: Path) -> None:
    (home / CALIBRATION).write_text("{")
    assert "Delete it, and measure again" in page(admin_client)


def test_whoever_may_see_versions_may_plan(client: Client) -> None:
    assert client.get(reverse("dashboard:planner")).status_code == 302
    user = User.objects.create_user("vera", password="x", is_staff=True)
    client.force_login(user)
    assert client.get(reverse("dashboard:planner")).status_code == 403
    user.groups.add(Group.objects.get(name="viewer"))
    client.force_login(User.objects.get(pk=user.pk))
    assert "<strong>26</strong>" in page(client)


def test_the_page_of_a_version_warns_where_it_cannot_be_loaded(
    admin_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_planned_version(tmp_path, model="big")
    address = reverse("admin:registry_version_change", args=[version.pk])
    monkeypatch.setattr(capacity, "available_bytes", lambda: 64 * 2**30)
    assert "big/1 needs" not in admin_client.get(address).content.decode()
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2**30)
    shown = admin_client.get(address).content.decode()
    assert "big/1 needs 2," in shown
    assert "1,024 MiB are available" in shown
