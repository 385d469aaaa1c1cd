"""Recording what happened, and checking that nobody has changed the record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from controlplane.events.models import GENESIS, ChainHead, Event, Outbox

BATCH = 1000
# One call ends after this many batches; the next call goes on.
MAX_BATCHES = 200


@dataclass(frozen=True, slots=True)
class Verification:
    """What a walk along the chain found; ``problem`` is empty when every link holds."""

    num_events: int
    problem: str = ""

    @property
    def is_intact(self) -> bool:
        """Whether every event is there, in order, and unchanged."""
        return not self.problem


def record(
    *,
    type: str,
    subject: str,
    actor: str,
    now: datetime,
    reason: str = "",
    data: Mapping[str, Any] | None = None,
    topic: str = "",
) -> Event:
    """Append an event, and with ``topic`` an outbox row, inside the caller's transaction.

    Both exist exactly if the change they describe is committed. The head row is locked until then, so that the
    chain cannot fork; keep the transaction short.

    Raises:
        TransactionManagementError: the caller has no transaction open.
        ValueError: ``data`` holds something that is not finite JSON.
    """
    if not transaction.get_connection().in_atomic_block:
        raise transaction.TransactionManagementError("record() needs the caller's transaction.")
    head = ChainHead.objects.select_for_update().get(pk=ChainHead.SINGLETON)
    event = Event(
        sequence=head.sequence + 1,
        at=now,
        type=type,
        subject=subject,
        actor=actor,
        reason=reason,
        payload=_canonical(data or {}),
        previous_hash=head.hash,
    )
    event.hash = event.computed_hash()
    event.save(force_insert=True)
    head.sequence, head.hash = event.sequence, event.hash
    head.save(update_fields=["sequence", "hash"])
    if topic:
        Outbox.objects.create(event=event, topic=topic, subject=subject, created_at=now)
    return event


@transaction.atomic
def verify() -> Verification:
    """Walk the whole chain; the first broken link is named.

    Finds a changed field, a missing or inserted event, and a cut-off tail.
    """
    expected_hash, expected_sequence = GENESIS, 0
    for event in Event.objects.in_order().iterator():
        expected_sequence += 1
        if event.sequence != expected_sequence:
            return Verification(
                expected_sequence - 1,
                f"Event {expected_sequence} is missing before {event.sequence}.",
            )
        if event.previous_hash != expected_hash:
            return Verification(
                expected_sequence - 1, f"Event {event.sequence} does not follow the one before it."
            )
        if event.hash != event.computed_hash():
            return Verification(
                expected_sequence - 1, f"Event {event.sequence} was changed after it was written."
            )
        expected_hash = event.hash
    head = ChainHead.objects.get(pk=ChainHead.SINGLETON)
    if (head.sequence, head.hash) != (expected_sequence, expected_hash):
        return Verification(
            expected_sequence,
            f"The chain ends at event {expected_sequence}, but {head.sequence} were written.",
        )
    return Verification(expected_sequence)


def expire_outbox(*, keep: timedelta, now: datetime) -> int:
    """Delete outbox rows that were carried out longer than ``keep`` ago; how many. Events stay, and what waits too.

    It works in small transactions: SQLite has one writer, and the others must not wait for a large one.
    """
    done = Outbox.objects.done_before(now - keep).order_by("pk")
    num_deleted = 0
    for _ in range(MAX_BATCHES):
        ids = list(done.values_list("pk", flat=True)[:BATCH])
        if not ids:
            break
        num_deleted += Outbox.objects.filter(pk__in=ids).delete()[0]
    return num_deleted


def _canonical(data: Mapping[str, Any]) -> str:
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
