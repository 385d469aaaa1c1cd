"""How long the request log is kept, and the list of terms that no answer should hold."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from controlplane.events.services import record
from controlplane.monitoring.models import Feedback, FlaggedTerm, RequestLog, RequestLogQuerySet

logger = logging.getLogger(__name__)

BATCH = 1000
# One call ends after this many batches; the next call goes on.
MAX_BATCHES = 200


@dataclass(frozen=True, slots=True)
class Retention:
    """How long lines are kept, and how much shorter the texts in them."""

    rows: timedelta
    texts: timedelta


@dataclass(frozen=True, slots=True)
class Expired:
    """What one call of ``expire`` took away."""

    num_rows: int
    num_texts: int


def expire(*, retention: Retention, now: datetime) -> Expired:
    """Delete lines, and blank texts, that are older than they may be.

    It works in small transactions: SQLite has one writer, and the others must not wait for a large one.
    """
    old_rows = RequestLog.objects.finished_before(now - retention.rows)
    old_texts = RequestLog.objects.finished_before(now - retention.texts).with_texts()
    expired = Expired(num_rows=_delete(old_rows), num_texts=_blank(old_texts))
    Feedback.objects.given_before(now - retention.rows).delete()
    Feedback.objects.given_before(now - retention.texts).with_comment().update(comment=None)
    if expired.num_rows or expired.num_texts:
        logger.info("request log expired rows=%d texts=%d", expired.num_rows, expired.num_texts)
    return expired


@transaction.atomic
def save_term(*, term: FlaggedTerm, actor: str, now: datetime) -> None:
    """Add or change a term of the list that answers are looked through for; classifiers have a new version from now on."""
    term.save()
    record(
        type="flagged_term.saved",
        subject=f"flagged_term:{term.pk}",
        actor=actor,
        now=now,
        data={"term": term.term, "is_active": term.is_active},
    )


def _delete(rows: RequestLogQuerySet) -> int:
    total = 0
    for _ in range(MAX_BATCHES):
        ids = list(rows.order_by("id").values_list("id", flat=True)[:BATCH])
        if not ids:
            break
        total += RequestLog.objects.filter(id__in=ids).delete()[0]
    return total


def _blank(rows: RequestLogQuerySet) -> int:
    total = 0
    for _ in range(MAX_BATCHES):
        ids = list(rows.order_by("id").values_list("id", flat=True)[:BATCH])
        if not ids:
            break
        total += RequestLog.objects.filter(id__in=ids).update(prompt=None, completion=None)
    return total
