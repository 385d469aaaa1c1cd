"""From the log stream in Redis to rows, in batches."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import cast

from django.db import models

from controlplane.monitoring.models import RequestLog
from inference.protocol import RequestRecord
from inference.queue import Queue

logger = logging.getLogger(__name__)

CONSUMER = "control"
BATCH = 500
# One call ends after this many batches, so that a long backlog does not keep other work waiting.
MAX_BATCHES = 20


def intake(*, queue: Queue) -> int:
    """Move what the log stream holds into the database; returns the number of entries read.

    An entry is acknowledged after its row is committed. A crash in between brings it again, and the unique request id
    lets the second one fall away: nothing is lost, nothing counted twice.
    """
    num_read = 0
    for _ in range(MAX_BATCHES):
        entries = queue.read_log(CONSUMER, BATCH)
        if not entries:
            break
        RequestLog.objects.bulk_create(
            [row_of(entry.record) for entry in entries], ignore_conflicts=True, batch_size=BATCH
        )
        queue.ack_log([entry.entry_id for entry in entries])
        num_read += len(entries)
    return num_read


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
        queue_s=record.queue_s,
        first_token_s=record.first_token_s,
        total_s=record.total_s,
        finished_at=datetime.fromtimestamp(record.finished_at, tz=UTC),
        user=_fit("user", record.user),
        tags=dict(record.tags),
        prompt=_storable(record.prompt),
        completion=_storable(record.completion),
    )


def _fit(name: str, text: str) -> str:
    field = cast("models.CharField[str, str]", RequestLog._meta.get_field(name))
    return text.replace("\x00", "")[: field.max_length]


def _storable(text: str | None) -> str | None:
    # PostgreSQL has no NUL in text.
    return None if text is None else text.replace("\x00", "")
