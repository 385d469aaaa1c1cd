"""What the beat calls exists, is bounded, and does what it says."""

from __future__ import annotations

import pytest
from django.utils import timezone

from controlplane.celery import QUEUE, app
from controlplane.endpoints import publication
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
    ):
        task()
    assert connected.read_route("chat") is not None
    assert publication.reconcile(queue=connected, now=timezone.now()) == []
    assert RequestLog.objects.count() == 1
