"""What happened: events in one unbroken chain, and the outbox of work they leave for others."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any, NoReturn, Self

from django.db import models

GENESIS = "0" * 64


class AppendOnly(Exception):
    """Somebody tried to change or delete an event; write a new one that corrects it."""


class EventQuerySet(models.QuerySet["Event"]):
    """Events, to be read only."""

    def about(self, subject: str) -> Self:
        """Events of one thing, such as ``endpoint:chat``."""
        return self.filter(subject=subject)

    def in_order(self) -> Self:
        """Oldest first, as the chain runs."""
        return self.order_by("sequence")

    def update(self, **_: Any) -> NoReturn:
        """Refused: events are append-only."""
        raise AppendOnly("Events are append-only; record a new one instead of changing old ones.")

    def delete(self) -> NoReturn:
        """Refused: events are append-only."""
        raise AppendOnly("Events are append-only; they cannot be deleted.")


class Event(models.Model):
    """One audited fact, chained to the one before it by hash.

    ``payload`` is canonical JSON text rather than a JSON column: a database may rewrite numbers inside JSON, and
    the hash must be computable from what is stored. Triggers refuse UPDATE and DELETE, whoever sends them.
    """

    sequence = models.PositiveBigIntegerField(unique=True)
    at = models.DateTimeField(db_index=True)
    type = models.CharField(max_length=64, db_index=True)
    subject = models.CharField(max_length=128, db_index=True)
    actor = models.CharField(max_length=150)
    reason = models.CharField(max_length=500, blank=True)
    payload = models.TextField(default="{}")
    previous_hash = models.CharField(max_length=64, unique=True)
    hash = models.CharField(max_length=64, unique=True)

    objects = EventQuerySet.as_manager()

    def __str__(self) -> str:
        return f"{self.sequence} {self.type} {self.subject}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Insert; a row that already stands is refused."""
        if not self._state.adding:
            raise AppendOnly(f"Event {self.sequence} stands; record a new one that corrects it.")
        super().save(*args, **kwargs)

    def delete(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: events are append-only."""
        raise AppendOnly(f"Event {self.sequence} cannot be deleted; events are append-only.")

    @property
    def data(self) -> dict[str, Any]:
        """The numbers and names behind the event."""
        value: dict[str, Any] = json.loads(self.payload)
        return value

    def computed_hash(self) -> str:
        """What ``hash`` must be: SHA-256 over the hash before it and the canonical row."""
        row = [
            self.sequence,
            self.at.astimezone(UTC).isoformat(timespec="microseconds"),
            self.type,
            self.subject,
            self.actor,
            self.reason,
            self.payload,
        ]
        text = json.dumps(row, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256((self.previous_hash + text).encode()).hexdigest()


class ChainHead(models.Model):
    """The end of the chain, one row: locking it puts writers in line, and it shows a cut-off tail."""

    SINGLETON = 1

    sequence = models.PositiveBigIntegerField(default=0)
    hash = models.CharField(max_length=64, default=GENESIS)

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(pk=1), name="events_one_head")]

    def __str__(self) -> str:
        return f"head {self.sequence}"


class OutboxQuerySet(models.QuerySet["Outbox"]):
    """Work that committed events left behind."""

    def waiting(self, topic: str) -> Self:
        """Rows of ``topic`` that nobody has carried out, oldest first."""
        return self.filter(topic=topic, done_at=None).order_by("pk")

    def done_before(self, moment: datetime) -> Self:
        """Rows that were carried out before ``moment``."""
        return self.filter(done_at__lt=moment)


class Outbox(models.Model):
    """One thing to carry out after an event: found by a periodic task, done at least once."""

    event = models.OneToOneField(Event, on_delete=models.PROTECT, related_name="outbox")
    topic = models.CharField(max_length=32)
    subject = models.CharField(max_length=128)
    created_at = models.DateTimeField()
    done_at = models.DateTimeField(null=True, blank=True)

    objects = OutboxQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "outbox"
        indexes = [
            models.Index(
                fields=["topic", "id"],
                condition=models.Q(done_at=None),
                name="events_outbox_waiting",
            )
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.subject}"
