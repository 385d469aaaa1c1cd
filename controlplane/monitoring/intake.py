"""From the log stream in Redis to rows, in batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

from django.db import models

from controlplane.monitoring.models import Feedback, RequestLog
from inference.protocol import FeedbackRecord, RequestRecord
from inference.queue import Queue

logger = logging.getLogger(__name__)

CONSUMER = "control"
BATCH = 500
# One call ends after this many batches, so that a long backlog does not keep other work waiting.
MAX_BATCHES = 20
FEEDBACK_WAIT_S = 60.0  # for a request that another gateway has still to log


def intake(*, queue: Queue, now: datetime) -> int:
    """Move what the log stream holds into the database; returns the number of entries read.

    An entry is acknowledged after its row is committed. A crash in between brings it again, and the unique request id
    lets the second one fall away: nothing is lost, nothing counted twice. Feedback whose request is not there yet goes
    back to the end of the log for a while, before it is acknowledged; a call ends when nothing else comes.
    """
    num_read = 0
    early: set[FeedbackRecord] = set()
    for _ in range(MAX_BATCHES):
        entries = queue.read_log(CONSUMER, BATCH)
        if not entries:
            break
        records = [entry.record for entry in entries]
        rows = [row_of(each) for each in records if isinstance(each, RequestRecord)]
        RequestLog.objects.bulk_create(rows, ignore_conflicts=True, batch_size=BATCH)
        feedback = [each for each in records if isinstance(each, FeedbackRecord)]
        if len(feedback) == len(records) and early.issuperset(feedback):
            break  # what this call put back; the next one reads it again
        put_back = store_feedback(feedback, now=now)
        queue.append_feedback(put_back)
        queue.ack_log([entry.entry_id for entry in entries])
        early.update(put_back)
        num_read += len(entries)
    return num_read


def store_feedback(records: Sequence[FeedbackRecord], *, now: datetime) -> list[FeedbackRecord]:
    """Store the last word on each request that the same key sent; returns those whose request may still be logged.

    What names a request of another key, or none, is dropped: nobody learns whether the request exists.
    """
    if not records:
        return []
    names = {record.request_id for record in records}
    requests = {row.request_id: row for row in RequestLog.objects.filter(request_id__in=names)}
    early, foreign = [], 0
    for record in sorted(records, key=lambda each: each.at):
        request = requests.get(record.request_id)
        if request is not None and request.key_id == record.key_id:
            _store(record, request)
        elif request is None and now.timestamp() - record.at < FEEDBACK_WAIT_S:
            early.append(record)
        else:
            foreign += 1
    if foreign:
        logger.info("feedback dropped, its key sent no such request num=%d", foreign)
    return early


def row_of(record: RequestRecord) -> RequestLog:
    """The row of one record; names that callers chose are cut to the column, so that no entry can block the rest."""
    return RequestLog(
        request_id=record.id,
        key_id=record.key_id,
        endpoint=_fit("endpoint", record.endpoint),
        version=record.version,
        generation=record.generation,
        arm=record.arm,
        outcome=_fit("outcome", record.outcome),
        status=record.status,
        finish_reason=record.finish_reason,
        streamed=record.streamed,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.cached_tokens,
        queue_s=record.queue_s,
        first_token_s=record.first_token_s,
        total_s=record.total_s,
        engine_s=record.engine_s,
        finished_at=datetime.fromtimestamp(record.finished_at, tz=UTC),
        user=_fit("user", record.user),
        tags=dict(record.tags),
        prompt=_storable(record.prompt),
        completion=_storable(record.completion),
    )


def _store(record: FeedbackRecord, request: RequestLog) -> None:
    """Write it unless a later word stands there, as one that is read twice would."""
    at = datetime.fromtimestamp(record.at, tz=UTC)
    stores_texts = request.prompt is not None
    values = {
        "endpoint": request.endpoint,
        "version": request.version,
        "arm": request.arm,
        "rating": record.rating,
        "comment": _storable(record.comment) if stores_texts else None,
        "at": at,
    }
    feedback, is_new = Feedback.objects.get_or_create(request_id=record.request_id, defaults=values)
    if not is_new:
        Feedback.objects.filter(pk=feedback.pk, at__lt=at).update(**values)


def _fit(name: str, text: str) -> str:
    field = cast("models.CharField[str, str]", RequestLog._meta.get_field(name))
    return text.replace("\x00", "")[: field.max_length]


def _storable(text: str | None) -> str | None:
    # PostgreSQL has no NUL in text.
    return None if text is None else text.replace("\x00", "")
