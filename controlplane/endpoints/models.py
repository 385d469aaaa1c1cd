"""Which version answers: one row per endpoint, the truth that Redis holds a copy of."""

from __future__ import annotations

import secrets
import uuid
from datetime import datetime

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q

from controlplane.endpoints.routing import (
    DEFAULT_STANDBY_S,
    IN_FLIGHT_POLICIES,
    ROLES,
    EndpointState,
    Placed,
)
from controlplane.registry.models import Version, validate_slug

MAX_BP = 10_000
# No engine holds a request for an hour, and no version is looked at for longer than a month.
MAX_DEADLINE_S = 3600.0
MAX_STANDBY_S = 30 * 24 * 3600


def make_salt() -> str:
    """A fresh salt of the sticky buckets, so that the same users are not always the first to try a candidate."""
    return secrets.token_hex(8)


class EndpointQuerySet(models.QuerySet["Endpoint"]):
    """Endpoints, as their routes need them."""

    def with_versions(self) -> EndpointQuerySet:
        """With the versions of every role and the rejected ones, in two queries."""
        roles = [f"{role}__model" for role in ROLES]
        return self.select_related(*roles).prefetch_related("rejections__version__model")

    def with_standby_over(self, now: datetime) -> EndpointQuerySet:
        """Endpoints that keep a retired version longer than they were to."""
        return self.filter(retired_until__lte=now)


class Endpoint(models.Model):
    """The name applications put in ``model=``, and where it leads.

    ``generation`` rises with every change of the route within one ``incarnation``; a new incarnation begins when the
    database itself went back in time. ``published_generation`` is what Redis last confirmed.

    ``retired`` left its role and stays in a slot without a route until ``retired_until``. ``in_flight`` says how
    requests end that run on a version when it is rolled back, ``standby_s`` how long it stays to be looked at. ``ending``
    is how they end on what the newest change took the route from.

    ``rollout`` is the id of the rollout that holds the candidate, which then gets copies of ``shadow_bp`` of 10,000
    requests and scores ``score_bp`` answers, while the live version answers ``self_bp`` twice. A promote or a rollback
    by hand takes all of that away.
    """

    class InFlight(models.TextChoices):
        FINISH = "finish", "they finish where they are"
        RETRY = "retry_if_no_token", "those without a token start again on the live version"
        CUT = "cut", "they start again or end with an error at once"

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
    rollout = models.CharField(max_length=32, blank=True, default="", db_default="")
    shadow_bp = models.PositiveIntegerField(default=0, db_default=0)
    self_bp = models.PositiveIntegerField(default=0, db_default=0)
    score_bp = models.PositiveIntegerField(default=0, db_default=0)
    queue_cap = models.PositiveIntegerField(default=256, validators=[MinValueValidator(1)])
    deadline_s = models.FloatField(
        default=300.0, validators=[MinValueValidator(1.0), MaxValueValidator(MAX_DEADLINE_S)]
    )
    store_texts = models.BooleanField(default=False)
    # Defaults in the database as well: the release before this one does not know the columns.
    in_flight = models.CharField(
        max_length=24, choices=InFlight, default=InFlight.FINISH, db_default="finish"
    )
    ending = models.CharField(
        max_length=24, choices=InFlight, default=InFlight.FINISH, db_default="finish"
    )
    standby_s = models.PositiveIntegerField(
        default=DEFAULT_STANDBY_S,
        db_default=DEFAULT_STANDBY_S,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_STANDBY_S)],
    )
    retired = models.ForeignKey(
        Version, on_delete=models.PROTECT, related_name="+", null=True, blank=True
    )
    retired_until = models.DateTimeField(null=True, blank=True)
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
            models.CheckConstraint(condition=Q(standby_s__gte=1), name="endpoints_standby"),
            models.CheckConstraint(
                condition=Q(deadline_s__lte=MAX_DEADLINE_S, standby_s__lte=MAX_STANDBY_S),
                name="endpoints_longest_times",
            ),
            models.CheckConstraint(
                condition=Q(in_flight__in=IN_FLIGHT_POLICIES), name="endpoints_in_flight"
            ),
            models.CheckConstraint(
                condition=Q(ending__in=IN_FLIGHT_POLICIES), name="endpoints_ending"
            ),
            models.CheckConstraint(
                condition=Q(shadow_bp__lte=MAX_BP, self_bp__lte=MAX_BP, score_bp__lte=MAX_BP),
                name="endpoints_copies_range",
            ),
            models.CheckConstraint(
                condition=Q(shadow_bp=0, self_bp=0, score_bp=0)
                | (Q(candidate__isnull=False) & ~Q(rollout="")),
                name="endpoints_copies_need_rollout",
            ),
            models.CheckConstraint(
                condition=Q(retired=None) | ~Q(retired=F("live")),
                name="endpoints_retired_is_not_live",
            ),
            models.CheckConstraint(
                condition=Q(retired=None, retired_until=None)
                | Q(retired__isnull=False, retired_until__isnull=False),
                name="endpoints_retired_for_a_time",
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
            live=place(self.live),
            previous=place(self.previous) if self.previous else None,
            candidate=place(self.candidate) if self.candidate else None,
            canary_bp=self.canary_bp,
            queue_cap=self.queue_cap,
            deadline_s=self.deadline_s,
            store_texts=self.store_texts,
            in_flight=self.in_flight,
            standby_s=self.standby_s,
            retired=place(self.retired) if self.retired else None,
            retired_until=self.retired_until,
            rejected=frozenset(each.version.name for each in self.rejections.all()),
            rollout=self.rollout,
            shadow_bp=self.shadow_bp,
            self_bp=self.self_bp,
            score_bp=self.score_bp,
            ending=self.ending,
        )


class Rejection(models.Model):
    """A version that was rolled back on an endpoint: nothing goes there again unless somebody names it."""

    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, related_name="rejections")
    version = models.ForeignKey(Version, on_delete=models.PROTECT, related_name="+")
    at = models.DateTimeField()
    actor = models.CharField(max_length=150)
    reason = models.CharField(max_length=500, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["endpoint", "version"], name="endpoints_rejected_once")
        ]

    def __str__(self) -> str:
        return f"{self.version} on {self.endpoint}"


def place(version: Version) -> Placed:
    """The version as slots load it."""
    # The compute dtype belongs to the version: the machine's default must not decide an answer.
    options = {"dtype": version.dtype, **version.engine_options}
    return Placed(
        name=version.name,
        artifact=version.artifact,
        engine_options=options,
        runtime=version.runtime.get("interpreter", ""),
        runtime_digest=version.runtime.get("digest", ""),
    )
