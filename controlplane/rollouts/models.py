"""Policies in versions, rollouts with their steps, the counts that verdicts stand on, and the looks at them."""

from __future__ import annotations

import secrets
from typing import Any, NoReturn, Self

from django.db import models
from django.db.models import Q

from controlplane.endpoints.models import MAX_BP, Endpoint
from controlplane.registry.models import Version, validate_slug
from controlplane.rollouts.machine import ACTIVE, FINAL, State
from controlplane.rollouts.pairs import Pair

__all__ = ["Look", "Pair", "Policy", "PolicyImmutable", "Rollout", "SegmentCount", "Step"]


class PolicyImmutable(Exception):
    """Somebody tried to change or delete a policy; save the document as its next version."""


class PolicyQuerySet(models.QuerySet["Policy"]):
    """Policies, in versions."""

    def newest(self, name: str) -> Self:
        """The versions of one policy, the newest first."""
        return self.filter(name=name).order_by("-version")

    def named(self, name: str) -> Self:
        """``name/version``, or of a bare ``name`` the newest version."""
        base, _, number = name.rpartition("/")
        if not base:
            return self.newest(name)
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            return self.none()
        return self.filter(name=base, version=int(number))


class Policy(models.Model):
    """What a candidate has to show, as one version that never changes; ``rollouts.policy`` reads ``document``."""

    name = models.CharField(max_length=64, validators=[validate_slug])
    version = models.PositiveIntegerField()
    document = models.JSONField()
    description = models.TextField(blank=True, default="")
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=150)

    objects = PolicyQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "policies"
        constraints = [
            models.UniqueConstraint(fields=["name", "version"], name="rollouts_policy_version"),
            models.CheckConstraint(
                condition=Q(name__regex=r"^[a-z0-9][a-z0-9._-]*$"), name="rollouts_policy_name"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Insert; a version that stands is never changed.

        Raises:
            PolicyImmutable: save the document as the next version instead.
        """
        if not self._state.adding:
            raise PolicyImmutable(f"Policy {self} stands; save its document as the next version.")
        super().save(*args, **kwargs)

    def delete(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: rollouts and events go on speaking of it."""
        raise PolicyImmutable(f"Policy {self} cannot be deleted.")


def make_key() -> str:
    """The id of a new rollout, which is also the salt of its buckets."""
    return secrets.token_hex(8)


class RolloutQuerySet(models.QuerySet["Rollout"]):
    """Rollouts by where they stand."""

    def active(self) -> Self:
        """Those that have not ended."""
        return self.filter(state__in=sorted(ACTIVE))

    def of_endpoint(self, name: str) -> Self:
        """Rollouts on one endpoint."""
        return self.filter(endpoint__name=name)

    def with_names(self) -> Self:
        """With endpoint, versions and policy, in one query."""
        return self.select_related("endpoint", "incumbent__model", "candidate__model", "policy")

    def newest_first(self) -> Self:
        """As people read them."""
        return self.order_by("-pk")


class Rollout(models.Model):
    """One candidate on its way. Every change of ``state`` raises ``version`` by one, and leaves one event.

    ``document``, ``plan`` (segments) and ``limits`` (of latency, by metric and segment) are frozen at the start. The
    shares are what was decided last, and the route of the endpoint holds the same; ``weights`` lists from which
    generation of the endpoint on the candidate had how large a share. All time blocks before ``sealed_block`` have been
    counted, those before ``looked_block`` were looked at; ``arms`` are users per share and arm. ``is_released`` says that somebody, or its time, let the step go on that waits for that; ``overrides`` name
    the failed gates that somebody let it go on with. ``why`` is what it waits for.
    """

    class Hold(models.TextChoices):
        """Why a rollout is paused."""

        MANUAL = "manual", "somebody paused it"
        STEP = "step", "a step of the policy"
        GATE = "gate", "a gate that is not critical has failed"

    key = models.CharField(max_length=32, unique=True, default=make_key)
    endpoint = models.ForeignKey(Endpoint, on_delete=models.PROTECT, related_name="rollouts")
    incumbent = models.ForeignKey(Version, on_delete=models.PROTECT, related_name="+")
    candidate = models.ForeignKey(Version, on_delete=models.PROTECT, related_name="+")
    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="rollouts")
    document = models.JSONField()
    plan = models.JSONField(default=dict)
    limits = models.JSONField(default=list, blank=True)
    forecast = models.JSONField(default=list, blank=True)

    state = models.CharField(max_length=24, default=State.PREPARING)
    version = models.PositiveIntegerField(default=1)
    attempt = models.PositiveIntegerField(default=1)
    step_index = models.IntegerField(default=-1)
    step_at = models.DateTimeField()
    state_at = models.DateTimeField()
    is_released = models.BooleanField(default=False)
    hold = models.CharField(max_length=16, choices=Hold, blank=True, default="")
    overrides = models.JSONField(default=list, blank=True)
    why = models.CharField(max_length=500, blank=True, default="")

    verdict = models.CharField(max_length=16, default="INCONCLUSIVE")
    decision = models.CharField(max_length=16, default="inconclusive")
    verdict_reason = models.TextField(blank=True, default="")
    memory = models.JSONField(default=dict, blank=True)
    sealed_block = models.BigIntegerField(default=0)
    looked_block = models.BigIntegerField(default=0)
    arms = models.JSONField(default=dict, blank=True)
    num_looks = models.PositiveIntegerField(default=0)
    notices = models.JSONField(default=list, blank=True)

    canary_bp = models.PositiveIntegerField(default=0)
    shadow_bp = models.PositiveIntegerField(default=0)
    self_bp = models.PositiveIntegerField(default=0)
    score_bp = models.PositiveIntegerField(default=0)
    weights = models.JSONField(default=list, blank=True)
    unready_since = models.DateTimeField(null=True, blank=True)

    created_by = models.CharField(max_length=150)
    reason = models.CharField(max_length=500, blank=True, default="")
    approved_by = models.CharField(max_length=150, blank=True, default="")
    is_forced = models.BooleanField(default=False)
    created_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    promoted_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = RolloutQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["endpoint"],
                condition=Q(state__in=sorted(ACTIVE)),
                name="rollouts_one_active_per_endpoint",
            ),
            models.CheckConstraint(
                condition=Q(state__in=sorted(State)), name="rollouts_state_is_known"
            ),
            models.CheckConstraint(
                condition=Q(
                    canary_bp__lte=MAX_BP,
                    shadow_bp__lte=MAX_BP,
                    self_bp__lte=MAX_BP,
                    score_bp__lte=MAX_BP,
                ),
                name="rollouts_shares_range",
            ),
            # An end has no traffic to decide about, and only an end has an end.
            models.CheckConstraint(
                condition=Q(state__in=sorted(ACTIVE), ended_at=None)
                | Q(
                    state__in=sorted(FINAL),
                    ended_at__isnull=False,
                    canary_bp=0,
                    shadow_bp=0,
                    self_bp=0,
                    score_bp=0,
                ),
                name="rollouts_end_has_no_traffic",
            ),
            # No data is never a pass: nothing is promoted but by the gates, or by an approver who says so.
            models.CheckConstraint(
                condition=~Q(state__in=[State.BAKING, State.PROMOTED])
                | (Q(promoted_at__isnull=False) & (Q(decision="promote") | Q(is_forced=True))),
                name="rollouts_promoted_by_verdict",
            ),
        ]
        indexes = [models.Index(fields=["endpoint", "-id"], name="rollouts_endpoint_newest")]

    def __str__(self) -> str:
        return self.key

    @property
    def subject(self) -> str:
        """What events of this rollout are about."""
        return f"rollout:{self.key}"

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.state in ACTIVE


class Step(models.Model):
    """One stay at one step, of which -1 is the time until the candidate is ready.

    ``counts`` are the observations that the step itself has brought, by segment: its floor is measured on them.
    """

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="steps")
    index = models.IntegerField()
    kind = models.CharField(max_length=16)
    entered_at = models.DateTimeField()
    left_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=24, blank=True, default="")
    counts = models.JSONField(default=dict, blank=True)
    why = models.CharField(max_length=500, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rollout", "index"], name="rollouts_step_once"),
        ]

    def __str__(self) -> str:
        return f"{self.rollout_id} {self.index} {self.kind}"


class SegmentCount(models.Model):
    """What was counted of one metric on one segment: it adds, has no order, and is all that evidence needs.

    ``counts`` are the observations and ``matched`` the differences to the incumbent of the same time, both as cell to
    number. The others describe each arm, and how many of the intended comparisons took place.
    """

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="counts")
    metric = models.CharField(max_length=64)
    segment = models.CharField(max_length=1000)
    counts = models.JSONField(default=dict)
    matched = models.JSONField(null=True, blank=True)
    num_intended = models.PositiveIntegerField(default=0)
    num_dropped = models.PositiveIntegerField(default=0)
    num_incumbent = models.PositiveIntegerField(default=0)
    num_candidate = models.PositiveIntegerField(default=0)
    sum_incumbent = models.FloatField(default=0.0)
    sum_candidate = models.FloatField(default=0.0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["rollout", "metric", "segment"], name="rollouts_counted_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.rollout_id} {self.metric} {self.segment}"


class Look(models.Model):
    """One look at the counts, and what it said. Looks that say the same as the one before take its place.

    ``number`` counts all looks, ``since`` is when the first of these was taken, and ``results`` hold each metric on each
    segment with its numbers and its sentence.
    """

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="looks")
    number = models.PositiveIntegerField()
    since = models.DateTimeField()
    at = models.DateTimeField()
    step_index = models.IntegerField()
    verdict = models.CharField(max_length=16)
    decision = models.CharField(max_length=16)
    reason = models.TextField()
    log_e_rollback = models.FloatField()
    results = models.JSONField()
    notices = models.JSONField(default=list)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rollout", "number"], name="rollouts_look_number")
        ]

    def __str__(self) -> str:
        return f"{self.rollout_id} look {self.number}"
