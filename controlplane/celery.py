"""The Celery app of the control plane: its beat, and how it treats the broker.

The beat names tasks and imports none. Every task looks for work that committed rows left behind, so a lost message
costs one tick; a late one expires instead of piling up behind others.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.control")

from celery import Celery
from celery.app.amqp import AMQP
from django.conf import settings
from kombu.connection import Connection

TASKS = "controlplane.tasks.control"
QUEUE = "control"
BROKER_OPTIONS = {
    "global_keyprefix": "celery:",
    # A task taken by a worker that died comes back after this long; the beat is there long before.
    "visibility_timeout": 600,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    # The time-out must exceed the blocking pop (1 s); a stalled connection is noticed after it.
    "socket_timeout": 10,
    "socket_connect_timeout": 3,
    "socket_keepalive": True,
    "retry_on_timeout": True,
    "health_check_interval": 10,
}
RECONNECT = {"interval_start": 1.0, "interval_step": 0.0, "interval_max": 1.0}


class PromptConnection(Connection):
    """A connection to the broker that looks every second whether the broker is back.

    Worker and beat wait here, and name no pause: kombu's own (5.7) grows to half a minute, and a route would stay wrong
    for as long after Redis is back.
    """

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """As kombu's, with another pause between tries where the caller names none."""
        options = {**RECONNECT, **options}
        return super().ensure_connection(*args, **options)  # type: ignore[no-untyped-call]


class PromptBroker(AMQP):  # type: ignore[misc]
    """What an app speaks to its broker with."""

    Connection = PromptConnection


def every(task: str, seconds: float, *, expires_s: float | None = None) -> dict[str, Any]:
    """A beat entry for ``task``; a message that waited longer than ``expires_s`` (one interval) is dropped."""
    return {
        "task": f"{TASKS}.{task}",
        "schedule": seconds,
        "options": {"expires": expires_s or seconds, "queue": QUEUE},
    }


app = Celery("tatkal", amqp=PromptBroker)
app.conf.update(
    broker_url=settings.REDIS_URL,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options=BROKER_OPTIONS,
    beat_schedule={
        "relay": every("relay", 1.0),
        "intake": every("intake", 1.0),
        "intake-answers": every("intake_answers", 1.0),
        "score-pairs": every("score_pairs", 5.0),
        "tick-rollouts": every("tick_rollouts", 1.0),
        "reconcile": every("reconcile", 2.0),
        "expire-standby": every("expire_standby", 10.0),
        "publish-keys": every("publish_keys", 2.0),
        "import-pending": every("import_pending", 5.0),
        "expire-idempotency": every("expire_idempotency", 3600.0, expires_s=600.0),
        "expire-log": every("expire_log", 3600.0, expires_s=600.0),
        "expire-pairs": every("expire_pairs", 3600.0, expires_s=600.0),
        "expire-outbox": every("expire_outbox", 3600.0, expires_s=600.0),
    },
    task_default_queue=QUEUE,
    task_acks_late=True,
    task_reject_on_worker_lost=False,
    task_ignore_result=True,
    accept_content=["json"],
    task_serializer="json",
    worker_prefetch_multiplier=1,
    # Threads cannot be cancelled, only warned about; every task may run twice anyway.
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_soft_shutdown_timeout=30,
    worker_send_task_events=False,
    # Nobody inspects workers over the broker, so nobody can command them over it either.
    worker_enable_remote_control=False,
    worker_hijack_root_logger=False,
    timezone="UTC",
    enable_utc=True,
)
