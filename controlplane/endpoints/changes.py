"""One change of an endpoint: a move, committed with its event and outbox row, and then published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

from django.db import transaction

from controlplane.endpoints.models import Endpoint, Rejection
from controlplane.endpoints.moves import Settings, summarize
from controlplane.endpoints.publication import TOPIC, Published, publish_if_possible
from controlplane.endpoints.routing import ROLES, EndpointState, Placed, names_of
from controlplane.errors import DomainError
from controlplane.events.services import record
from controlplane.registry.models import Version
from inference.queue import Queue

STANDBY_ENDED = "endpoint.standby_ended"
# What a move may change on the row beside its roles.
_COPIED = (
    "generation", "salt", "canary_bp", "queue_cap", "deadline_s", "store_texts", "in_flight", "standby_s",
    "retired_until", "rollout", "shadow_bp", "self_bp", "score_bp", "ending",
)  # fmt: skip


class UnknownEndpoint(DomainError):
    """There is no such endpoint."""

    code = "not_found"
    status = HTTPStatus.NOT_FOUND


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of a change.

    ``is_changed`` is false where the state was already so. ``published`` is None while Redis is away, and
    ``applied_in_ms`` runs from the beginning of the call until Redis had the route.
    """

    endpoint: Endpoint
    is_changed: bool
    published: Published | None
    applied_in_ms: float | None

    @property
    def state(self) -> EndpointState:
        """The endpoint as it is afterwards."""
        return self.endpoint.to_state()


@dataclass(frozen=True, slots=True)
class Change:
    """Who changes what and why; ``versions`` are those that get a role they may not have had."""

    type: str
    name: str
    actor: str
    reason: str
    now: datetime
    versions: list[Version]

    def commit(self, move: Callable[[EndpointState], EndpointState]) -> tuple[Endpoint, bool]:
        """Make the move in one transaction, with the row locked; whether anything changed."""
        # Durable: what is published must be committed, and not hang in somebody's outer transaction.
        with transaction.atomic(durable=True):
            return self.write(move)

    def write(self, move: Callable[[EndpointState], EndpointState]) -> tuple[Endpoint, bool]:
        """Make the move in the caller's transaction, who publishes when it is committed."""
        endpoint = _lock(self.name)
        before = endpoint.to_state()
        after = move(before)
        if after == before:
            return endpoint, False
        self._write(endpoint, before, after)
        data = {**summarize(after), "was": _differences(summarize(before), summarize(after))}
        record_change(
            self.type,
            self.name,
            actor=self.actor,
            reason=self.reason,
            now=self.now,
            data=data | _settings_of(before, after),
        )
        self._record_lost_standby(before, after)
        return endpoint, True

    def publish(
        self, endpoint: Endpoint, is_changed: bool, queue: Queue, started_at: float
    ) -> Changed:
        """Bring the change to Redis, if Redis is there."""
        published = publish_if_possible(name=self.name, queue=queue, now=self.now)
        fresh = Endpoint.objects.with_versions().get(pk=endpoint.pk)
        applied_in_ms = (published.applied_at - started_at) * 1000 if published else None
        return Changed(fresh, is_changed, published, applied_in_ms)

    def _record_lost_standby(self, before: EndpointState, after: EndpointState) -> None:
        """Only one version is kept to be looked at: say so when another takes its place before its time is over."""
        kept, heir = before.retired, after.retired
        if kept is None or heir is None or kept.name in names_of(after):
            return
        record(
            type=STANDBY_ENDED,
            subject=f"endpoint:{self.name}",
            actor=self.actor,
            reason=f"{heir.name} was taken back as well, and one version is kept",
            now=self.now,
            data={"generation": after.generation, "version": kept.name},
        )

    def _write(self, endpoint: Endpoint, before: EndpointState, after: EndpointState) -> None:
        held = [getattr(endpoint, role) for role in ROLES]
        known = {version.name: version for version in (*held, *self.versions) if version}
        for role in ROLES:
            placed: Placed | None = getattr(after, role)
            setattr(endpoint, role, known[placed.name] if placed else None)
        for name in _COPIED:
            setattr(endpoint, name, getattr(after, name))
        endpoint.updated_at = self.now
        endpoint.save(update_fields=[*ROLES, *_COPIED, "updated_at"])
        for name in after.rejected - before.rejected:
            Rejection.objects.create(
                endpoint=endpoint,
                version=known[name],
                at=self.now,
                actor=self.actor,
                reason=self.reason,
            )
        gone = [known[name].pk for name in before.rejected - after.rejected]
        endpoint.rejections.filter(version__in=gone).delete()


def record_change(
    type: str, name: str, *, actor: str, reason: str, now: datetime, data: Mapping[str, Any]
) -> None:
    """Write the event of a change and the outbox row that publishes it, in the caller's transaction."""
    record(
        type=type,
        subject=f"endpoint:{name}",
        actor=actor,
        reason=reason,
        now=now,
        data=data,
        topic=TOPIC,
    )


def _lock(name: str) -> Endpoint:
    # Locked alone and read afterwards: after waiting for a lock PostgreSQL looks at the row again, but not at those it
    # was joined with, and a row whose live version changed meanwhile would be gone from the join.
    found = Endpoint.objects.select_for_update().filter(name=name).values_list("pk", flat=True)
    if not found:
        raise UnknownEndpoint(f"There is no endpoint {name!r}.")
    return Endpoint.objects.with_versions().get(pk=found[0])


def _settings_of(before: EndpointState, after: EndpointState) -> dict[str, Any]:
    names = Settings.__dataclass_fields__
    changed = {
        name: getattr(after, name)
        for name in names
        if getattr(before, name) != getattr(after, name)
    }
    return {"settings": changed} if changed else {}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What stood in the places that changed."""
    return {name: value for name, value in before.items() if after.get(name) != value}
