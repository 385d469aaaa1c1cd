"""Which version answers: one row per endpoint, the truth that Redis holds a copy of."""

from __future__ import annotations

import secrets
import uuid

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q

from controlplane.endpoints.routing import EndpointState, Placed
from controlplane.registry.models import Version, validate_slug

MAX_BP = 10_000


def make_salt() -> str:
    """A fresh salt of the sticky buckets, so that the same users are not always the first to try a candidate."""
    return secrets.token_hex(8)


class EndpointQuerySet(models.QuerySet["Endpoint"]):
    """Endpoints, as their routes need them."""

    def with_versions(self) -> EndpointQuerySet:
        """With the versions of every role, in one query."""
        return self.select_related("live__model", "previous__model", "candidate__model")


class Endpoint(models.Model):
    """The name applications put in ``model=``, and where it leads.

    ``generation`` rises with every change of the route within one ``incarnation``; a new incarnation begins when the
    database itself went back in time. ``published_generation`` is what Redis last confirmed.
    """

    name = models.CharField(max_length=64, unique=True, validators=[validate_slug])
    live = models.ForeignKey(Version, on_delete=models.PROTECT, related_name="+")
    previous = models.ForeignKey(
        Version, on_delete=models.PROTECT, related_name="+", null=True, blank=True
    )
    candidate = models.ForeignKey(
        Version, on_delete=models.PROTECT, related_name="+", null=True, blank=True
    )
    canary_bp = models.PositiveIntegerField(default=0, validators=[MaxValueValidator(MAX_BP)])
    generation = models.PositiveBigIntegerField(default=1)
    published_generation = models.PositiveBigIntegerField(default=0)
    incarnation = models.UUIDField(default=uuid.uuid4)
    salt = models.CharField(max_length=32, default=make_salt)
    queue_cap = models.PositiveIntegerField(default=256, validators=[MinValueValidator(1)])
    deadline_s = models.FloatField(default=300.0, validators=[MinValueValidator(1.0)])
    store_texts = models.BooleanField(default=False)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    objects = EndpointQuerySet.as_manager()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(name__regex=r"^[a-z0-9][a-z0-9._-]*$"), name="endpoints_name"
            ),
            models.CheckConstraint(
                condition=Q(canary_bp__gte=0, canary_bp__lte=MAX_BP),
                name="endpoints_canary_bp_range",
            ),
            models.CheckConstraint(
                condition=Q(canary_bp=0) | Q(candidate__isnull=False),
                name="endpoints_canary_needs_candidate",
            ),
            models.CheckConstraint(
                condition=Q(previous=None) | ~Q(previous=F("live")),
                name="endpoints_previous_is_not_live",
            ),
            models.CheckConstraint(
                condition=Q(candidate=None) | ~Q(candidate=F("live")),
                name="endpoints_candidate_is_not_live",
            ),
            models.CheckConstraint(
                condition=Q(queue_cap__gte=1, deadline_s__gte=1.0), name="endpoints_limits"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_published(self) -> bool:
        """Whether Redis has confirmed the newest route."""
        return self.published_generation == self.generation

    def to_state(self) -> EndpointState:
        """The row as the pure rules see it; read it with ``with_versions()``."""
        return EndpointState(
            name=self.name,
            incarnation=str(self.incarnation),
            generation=self.generation,
            salt=self.salt,
            live=_place(self.live),
            previous=_place(self.previous) if self.previous else None,
            candidate=_place(self.candidate) if self.candidate else None,
            canary_bp=self.canary_bp,
            queue_cap=self.queue_cap,
            deadline_s=self.deadline_s,
            store_texts=self.store_texts,
        )


def _place(version: Version) -> Placed:
    # The compute dtype belongs to the version: the machine's default must not decide an answer.
    options = {"dtype": version.dtype, **version.engine_options}
    return Placed(name=version.name, artifact=version.artifact, engine_options=options)
