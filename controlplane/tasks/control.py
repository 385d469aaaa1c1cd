"""What the beat calls: each task is one call, may run twice, at once with itself, and late."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_ready
from django.conf import settings
from django.utils import timezone

from controlplane.access import idempotency
from controlplane.access import services as access
from controlplane.celery import QUEUE, app
from controlplane.endpoints import publication
from controlplane.endpoints import services as endpoints
from controlplane.endpoints.publication import connection
from controlplane.monitoring import intake as monitoring_intake
from controlplane.monitoring import services as monitoring
from controlplane.registry import services as registry
from controlplane.registry.imports import Limits


@app.task(name="controlplane.tasks.control.relay")
def relay(**_: Any) -> None:
    """Carry out route changes that a publication missed."""
    publication.relay(queue=connection(), now=timezone.now())


@app.task(name="controlplane.tasks.control.reconcile")
def reconcile(**_: Any) -> None:
    """Bring Redis to what the database says."""
    publication.reconcile(queue=connection(), now=timezone.now())


@app.task(name="controlplane.tasks.control.expire_standby")
def expire_standby(**_: Any) -> None:
    """Let retired versions go whose standby is over."""
    endpoints.expire_standby(queue=connection(), now=timezone.now())


@app.task(name="controlplane.tasks.control.publish_keys")
def publish_keys(**_: Any) -> None:
    """Bring the gateways' keys to what the database says."""
    access.publish(queue=connection(), now=timezone.now())


@app.task(name="controlplane.tasks.control.intake")
def intake(**_: Any) -> None:
    """Store finished requests."""
    monitoring_intake.intake(queue=connection())


@app.task(name="controlplane.tasks.control.import_pending")
def import_pending(**_: Any) -> None:
    """Turn the oldest registered source into an artifact."""
    limits = Limits(settings.IMPORT_TIMEOUT_S, settings.IMPORT_MEMORY_BYTES)
    registry.import_pending(
        importing=registry.Importing(root=settings.ARTIFACT_ROOT, limits=limits),
        clock=timezone.now,
    )


@app.task(name="controlplane.tasks.control.expire_idempotency")
def expire_idempotency(**_: Any) -> None:
    """Forget answers that are kept for repeated requests, after a day."""
    idempotency.expire(now=timezone.now())


@app.task(name="controlplane.tasks.control.expire_log")
def expire_log(**_: Any) -> None:
    """Drop log lines and texts that are older than they may be."""
    monitoring.expire(
        retention=monitoring.Retention(settings.LOG_RETENTION, settings.TEXT_RETENTION),
        now=timezone.now(),
    )


@worker_ready.connect
def fill_redis(**_: Any) -> None:
    """Publish at once when a worker comes up: a fresh or emptied Redis need not wait for the first beat."""
    for task in (reconcile, publish_keys):
        task.apply_async(queue=QUEUE, expires=10)
