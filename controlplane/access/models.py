"""Who may: keys of applications and tokens of engineers, by digest."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models import Q

ROLES = ("viewer", "engineer", "approver")


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    """Keys by what they are good for."""

    def inference(self) -> Self:
        """Keys of applications, which gateways must know."""
        return self.filter(kind=ApiKey.Kind.INFERENCE)

    def control(self) -> Self:
        """Tokens of engineers."""
        return self.filter(kind=ApiKey.Kind.CONTROL)

    def active(self, now: datetime) -> Self:
        """Keys that open something at ``now``."""
        return self.filter(
            Q(expires_at=None) | Q(expires_at__gt=now),
            revoked_at=None,
        )


class ApiKey(models.Model):
    """A key for the gateway (``inference``) or a token for the control API (``control``), never its clear text.

    ``role`` belongs to control tokens alone: a viewer reads, an engineer changes, an approver may also approve.
    ``endpoints`` are the only ones that an application's key opens; none named are all of them.
    """

    class Kind(models.TextChoices):
        INFERENCE = "inference"
        CONTROL = "control"

    class Role(models.TextChoices):
        NONE = "", "none"
        VIEWER = "viewer"
        ENGINEER = "engineer"
        APPROVER = "approver"

    key_id = models.CharField("id", max_length=32, unique=True)
    name = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=Kind)
    role = models.CharField(max_length=16, choices=Role, blank=True, default=Role.NONE)
    endpoints = models.JSONField(
        default=list, db_default=models.Value([], models.JSONField()), blank=True
    )
    digest = models.CharField(max_length=64)
    last4 = models.CharField("last four characters", max_length=4)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=150)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        verbose_name = "API key"
        constraints = [
            models.CheckConstraint(
                condition=Q(kind="inference", role="") | Q(kind="control", role__in=ROLES),
                name="access_role_fits_kind",
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.key_id})"

    def state_at(self, now: datetime) -> str:
        """``active``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None and self.revoked_at <= now:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "active"

    def has_role(self, required: str) -> bool:
        """Whether this control token may do what ``required`` may; an application's key never does."""
        return (
            self.kind == self.Kind.CONTROL
            and self.role in ROLES
            and ROLES.index(self.role) >= ROLES.index(required)
        )


class IdempotentRequest(models.Model):
    """A request that was sent under an ``Idempotency-Key``: its answer once there is one, for a repeat to be given.

    ``digest`` is that of method, address and body. Without ``status`` the request is still being answered, or the
    process that did died.
    """

    caller = models.ForeignKey(ApiKey, on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=128)
    digest = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    answer = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    location = models.CharField(max_length=256, blank=True)
    created_at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["caller", "key"], name="access_idempotency_key")
        ]

    def __str__(self) -> str:
        return f"{self.key} of {self.caller}"
