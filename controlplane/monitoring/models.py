"""What the traffic looks like: one row per finished request."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from django.db import models


class RequestLogQuerySet(models.QuerySet["RequestLog"]):
    """Finished requests."""

    def served_by(self, version: str) -> Self:
        """Requests that the version called ``model/number`` answered."""
        return self.filter(version=version)

    def of_endpoint(self, endpoint: str) -> Self:
        """Requests that asked for ``endpoint``."""
        return self.filter(endpoint=endpoint)

    def finished_before(self, moment: datetime) -> Self:
        """Requests that ended before ``moment``."""
        return self.filter(finished_at__lt=moment)

    def with_texts(self) -> Self:
        """Requests whose prompt or completion is still stored."""
        return self.filter(models.Q(prompt__isnull=False) | models.Q(completion__isnull=False))

    def newest_first(self) -> Self:
        """As people read a log."""
        return self.order_by("-id")


class RequestLog(models.Model):
    """One line of the request log, as ``inference.protocol.RequestRecord`` brought it.

    Names, not foreign keys: a line stays true whatever becomes of its version, and thousands of lines a second must
    not lock the rows they speak of. ``prompt`` and ``completion`` are set only where the endpoint stores texts.
    """

    request_id = models.CharField(max_length=64, unique=True)
    key_id = models.CharField(max_length=32, blank=True)
    endpoint = models.CharField(max_length=64)
    version = models.CharField(max_length=80, blank=True)
    generation = models.PositiveBigIntegerField()
    arm = models.CharField(max_length=16, blank=True)
    outcome = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField()
    finish_reason = models.CharField(max_length=16, blank=True)
    streamed = models.BooleanField()
    prompt_tokens = models.PositiveIntegerField()
    completion_tokens = models.PositiveIntegerField()
    queue_s = models.FloatField(null=True)
    first_token_s = models.FloatField(null=True)
    total_s = models.FloatField()
    finished_at = models.DateTimeField()
    user = models.CharField(max_length=512, blank=True)
    tags = models.JSONField(default=dict, blank=True)
    prompt = models.TextField(null=True, blank=True)  # noqa: DJ001 (null: not stored; empty: an empty text)
    completion = models.TextField(null=True, blank=True)  # noqa: DJ001

    objects = RequestLogQuerySet.as_manager()

    class Meta:
        indexes = [
            models.Index(fields=["finished_at"], name="monitoring_finished"),
            models.Index(fields=["endpoint", "finished_at"], name="monitoring_endpoint"),
            models.Index(fields=["version", "finished_at"], name="monitoring_version"),
        ]

    def __str__(self) -> str:
        return self.request_id
