"""What the beat calls exists, is bounded, and does what it says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.celery import QUEUE, app
from controlplane.endpoints import publication
from controlplane.events.models import Event, Outbox
from controlplane.monitoring.models import RequestLog
from controlplane.tasks import control
from inference.queue import Queue
from tests.controlplane.monitoring.test_intake import append
from tests.factories import make_api_key, make_endpoint, make_log_row, make_record


@pytest.fixture
def connected(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The tasks' connection is that of this test."""
    monkeypatch.setattr(control, "connection", lambda: queue)
    return queue


def test_the_beat_names_tasks_that_exist_and_no_message_outlives_its_interval() -> None:
    entries = app.conf.beat_schedule.values()
    assert {entry["task"] for entry in entries} == {
        name for name in app.tasks if name.startswith("controlplane.")
    }
    for entry in entries:
        assert entry["options"]["queue"] == QUEUE
        assert 0 < entry["options"]["expires"] <= entry["schedule"]


def test_a_lost_broker_cancels_no_task_because_threads_cannot_be() -> None:
    assert not app.conf.worker_cancel_long_running_tasks_on_connection_loss


def test_every_task_takes_arguments_of_a_later_release() -> None:
    for name, task in app.tasks.items():
        if name.startswith("controlplane."):
            assert task.run.__code__.co_flags & 0x08, f"{name} takes no **kwargs"


@pytest.mark.django_db
def test_one_tick_of_each_brings_redis_and_database_together(
    connected: Queue, redis_url: str
) -> None:
    make_endpoint("chat")
    make_api_key()
    append(redis_url, [make_record(finished_at=timezone.now().timestamp())])
    make_log_row(finished_at="2020-01-01T00:00:00Z")
    for task in (
        control.relay,
        control.reconcile,
        control.expire_standby,
        control.expire_idempotency,
        control.publish_keys,
        control.intake,
        control.import_pending,
        control.expire_log,
        control.expire_outbox,
    ):
        task()
    assert connected.read_route("chat") is not None
    assert publication.reconcile(queue=connected, now=timezone.now()) == []
    assert RequestLog.objects.count() == 1
    assert Outbox.objects.filter(done_at=None).count() == 0


@pytest.mark.django_db
def test_what_was_carried_out_leaves_the_outbox_after_its_time_and_the_event_stays(
    settings: Any,
) -> None:
    settings.OUTBOX_RETENTION = timedelta(days=3)
    for name in ("old", "new", "waiting"):
        make_endpoint(name)
    now = timezone.now()
    rows = Outbox.objects.order_by("pk")
    for row, done_at in zip(
        rows, (now - timedelta(days=4), now - timedelta(days=2), None), strict=True
    ):
        Outbox.objects.filter(pk=row.pk).update(done_at=done_at, created_at=now - timedelta(days=9))
    num_events = Event.objects.count()
    control.expire_outbox()
    assert [row.subject for row in rows.all()] == ["endpoint:new", "endpoint:waiting"]
    assert Event.objects.count() == num_events
