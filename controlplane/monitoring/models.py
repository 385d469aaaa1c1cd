"""What the traffic looks like: one row per finished request, and what callers thought of some."""

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
    not lock the rows they speak of. ``engine_s`` are the engine seconds attributed to the request, ``cached_tokens``
    those of its prompt that were not computed again. ``prompt`` and ``completion`` are set only where the endpoint
    stores texts.
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
    cached_tokens = models.PositiveIntegerField(default=0, db_default=0)
    queue_s = models.FloatField(null=True)
    first_token_s = models.FloatField(null=True)
    total_s = models.FloatField()
    engine_s = models.FloatField(null=True)
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


class FeedbackQuerySet(models.QuerySet["Feedback"]):
    """What callers thought of answers."""

    def of_version(self, version: str) -> Self:
        """Of the answers of the version called ``model/number``."""
        return self.filter(version=version)

    def of_endpoint(self, endpoint: str) -> Self:
        """Of the answers of ``endpoint``."""
        return self.filter(endpoint=endpoint)

    def given_before(self, moment: datetime) -> Self:
        """Opinions that came before ``moment``."""
        return self.filter(at__lt=moment)

    def with_comment(self) -> Self:
        """Opinions with a text."""
        return self.exclude(comment=None)


class Feedback(models.Model):
    """What the caller of one request thought of its answer: the last word of the key that sent the request.

    ``rating`` is from -1, bad, to 1, good. Endpoint, version and arm are the request's. ``comment`` is kept only where the
    endpoint stores texts.
    """

    request_id = models.CharField(max_length=64, unique=True)
    endpoint = models.CharField(max_length=64)
    version = models.CharField(max_length=80, blank=True)
    arm = models.CharField(max_length=16, blank=True)
    rating = models.FloatField()
    comment = models.TextField(null=True, blank=True)  # noqa: DJ001 (null: not stored)
    at = models.DateTimeField()

    objects = FeedbackQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "feedback"
        constraints = [
            models.CheckConstraint(
                condition=models.Q(rating__gte=-1, rating__lte=1), name="monitoring_rating_range"
            )
        ]
        indexes = [
            models.Index(fields=["version", "at"], name="monitoring_feedback_version"),
            models.Index(fields=["at"], name="monitoring_feedback_at"),
        ]

    def __str__(self) -> str:
        return f"{self.request_id} {self.rating:+g}"


class FlaggedTermQuerySet(models.QuerySet["FlaggedTerm"]):
    """The list of terms."""

    def active_terms(self) -> tuple[str, ...]:
        """The terms that count, in order."""
        return tuple(self.filter(is_active=True).order_by("term").values_list("term", flat=True))


class FlaggedTerm(models.Model):
    """A word or phrase that no answer should hold; answers with one are flagged ``term``. It stays when it counts no more."""

    term = models.CharField(max_length=200, unique=True)
    is_active = models.BooleanField(default=True)
    note = models.CharField(max_length=500, blank=True, default="")

    objects = FlaggedTermQuerySet.as_manager()

    def __str__(self) -> str:
        return self.term
