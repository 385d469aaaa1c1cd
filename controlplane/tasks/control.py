"""What the beat calls: each task is one call, may run twice, at once with itself, and late."""

from __future__ import annotations

from functools import cache
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
from controlplane.events import services as events
from controlplane.monitoring import intake as monitoring_intake
from controlplane.monitoring import services as monitoring
from controlplane.registry import services as registry
from controlplane.registry.imports import Limits
from controlplane.rollouts import intake as rollouts_intake
from controlplane.rollouts import loop as rollouts_loop
from controlplane.rollouts import scoring
from controlplane.rollouts.scorers import Scorer, load_scorer


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
    """Store finished requests, and what callers thought of them."""
    monitoring_intake.intake(queue=connection(), now=timezone.now())


@app.task(name="controlplane.tasks.control.intake_answers")
def intake_answers(**_: Any) -> None:
    """Store the pairs whose halves have come."""
    rollouts_intake.intake_answers(queue=connection(), now=timezone.now(), scorer=_scorer_name())


@app.task(name="controlplane.tasks.control.score_pairs")
def score_pairs(**_: Any) -> None:
    """Have the scorer look at pairs that wait for it."""
    if (scorer := _scorer()) is not None:
        scoring.score_pairs(queue=connection(), scorer=scorer, now=timezone.now())


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


@app.task(name="controlplane.tasks.control.expire_outbox")
def expire_outbox(**_: Any) -> None:
    """Drop outbox rows that were carried out long ago."""
    events.expire_outbox(keep=settings.OUTBOX_RETENTION, now=timezone.now())


@app.task(name="controlplane.tasks.control.tick_rollouts")
def tick_rollouts(**_: Any) -> None:
    """Move every active rollout as far as it goes."""
    rollouts_loop.tick(queue=connection(), now=timezone.now())


@app.task(name="controlplane.tasks.control.expire_pairs")
def expire_pairs(**_: Any) -> None:
    """Drop pairs, and texts in them, that are older than they may be."""
    retention = monitoring.Retention(settings.LOG_RETENTION, settings.TEXT_RETENTION)
    scoring.expire_pairs(retention=retention, now=timezone.now())


@cache
def _scorer() -> Scorer | None:
    """The scorer of this process."""
    return load_scorer(
        settings.SCORER, token=settings.SCORER_TOKEN, timeout_s=settings.SCORER_TIMEOUT_S
    )


def _scorer_name() -> str:
    scorer = _scorer()
    return scorer.name if scorer is not None else ""


@worker_ready.connect
def fill_redis(**_: Any) -> None:
    """Publish at once when a worker comes up: a fresh or emptied Redis need not wait for the first beat."""
    for task in (reconcile, publish_keys):
        task.apply_async(queue=QUEUE, expires=10)
