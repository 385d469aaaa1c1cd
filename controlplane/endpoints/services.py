"""Changing where endpoints lead, and keeping Redis at what the database says.

Every change is one transaction (row, generation, event, outbox) and then a publication, which may be lost, repeated
or late: ``relay`` carries out what the outbox holds, and ``reconcile`` heals what nobody remembers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from http import HTTPStatus

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.routing import residents_of, route_of
from controlplane.errors import DomainError
from controlplane.events.models import Outbox
from controlplane.events.services import record
from controlplane.registry.models import Version
from inference.queue import Queue
from inference.replicas import SlotStatus, list_slots

logger = logging.getLogger(__name__)

TOPIC = "route"
RELAY_BATCH = 100


class EndpointExists(DomainError):
    """The name is taken."""

    code = "endpoint_exists"
    status = HTTPStatus.CONFLICT


class InvalidEndpoint(DomainError):
    """An endpoint cannot be as described."""

    code = "invalid_endpoint"
    status = HTTPStatus.BAD_REQUEST


class VersionNotReady(DomainError):
    """Only a version whose artifact is ready can serve."""

    code = "version_not_ready"
    status = HTTPStatus.CONFLICT
    permanent = False


class RouteRefused(DomainError):
    """Redis holds a newer generation of the same incarnation: this database went back in time."""

    code = "route_refused"
    status = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True)
class RoleReadiness:
    """One role of an endpoint, and the slots that hold its version."""

    role: str
    version: str
    slots: tuple[SlotStatus, ...]

    @property
    def is_ready(self) -> bool:
        """Whether at least one slot answers."""
        return any(slot.state == "ready" for slot in self.slots)


@cache
def connection() -> Queue:
    """The connections of this process to Redis, opened at first use."""
    return Queue(settings.REDIS_URL)


@transaction.atomic
def create(
    *,
    name: str,
    live: Version,
    actor: str,
    now: datetime,
    reason: str = "",
    queue_cap: int = 256,
    deadline_s: float = 300.0,
    store_texts: bool = False,
) -> Endpoint:
    """Add an endpoint that leads to ``live``; it is published after commit, by the relay at the latest.

    Raises:
        VersionNotReady: the artifact of ``live`` is not there yet.
        InvalidEndpoint: the name or a limit is out of range.
        EndpointExists: the name is taken.
    """
    if not live.is_ready:
        raise VersionNotReady(f"Version {live.name} is {live.state}; wait until it is ready.")
    endpoint = Endpoint(
        name=name,
        live=live,
        queue_cap=queue_cap,
        deadline_s=deadline_s,
        store_texts=store_texts,
        created_at=now,
        updated_at=now,
    )
    try:
        endpoint.clean_fields()
    except ValidationError as error:
        raise InvalidEndpoint(f"Endpoint {name!r}: {'; '.join(error.messages)}") from error
    try:
        with transaction.atomic():
            endpoint.save(force_insert=True)
    except IntegrityError as error:
        raise EndpointExists(f"Endpoint {name!r} exists already; choose another name.") from error
    record(
        type="endpoint.created",
        subject=f"endpoint:{name}",
        actor=actor,
        reason=reason,
        now=now,
        data={"generation": endpoint.generation, "live": live.name},
        topic=TOPIC,
    )
    return endpoint


def publish(*, name: str, queue: Queue) -> Endpoint:
    """Apply the newest committed route of ``name`` to Redis, then what slots should hold.

    May be called any number of times, in any order, by anyone.

    Raises:
        QueueUnavailable: Redis is away; ``relay`` and ``reconcile`` try again.
        RouteRefused: Redis knows a newer generation than this database.
    """
    endpoint = Endpoint.objects.with_versions().get(name=name)
    _apply(endpoint, queue)
    _publish_desired(queue)
    return endpoint


def relay(*, queue: Queue, now: datetime) -> int:
    """Carry out the route changes that wait in the outbox; returns how many are done.

    The newest row is published for each endpoint, which settles its older entries as well.
    """
    waiting = list(Outbox.objects.waiting(TOPIC)[:RELAY_BATCH])
    for subject in dict.fromkeys(row.subject for row in waiting):
        try:
            publish(name=subject.removeprefix("endpoint:"), queue=queue)
        except RouteRefused:
            # It waits for an operator; the routes of other endpoints must not wait with it.
            logger.exception("route refused subject=%s", subject)
            continue
        ids = [row.pk for row in waiting if row.subject == subject]
        Outbox.objects.filter(pk__in=ids, done_at=None).update(done_at=now)
    return len(waiting)


def reconcile(*, queue: Queue) -> list[str]:
    """Compare every route and the desired residents with Redis, publish what differs, and name it.

    It reads and writes whole states, so an emptied Redis is full again after one call.
    """
    healed = []
    for endpoint in Endpoint.objects.with_versions():
        if endpoint.is_published and queue.read_route(endpoint.name) == route_of(
            endpoint.to_state()
        ):
            continue
        try:
            _apply(endpoint, queue)
        except RouteRefused:
            logger.exception("route refused endpoint=%s", endpoint.name)
            continue
        healed.append(f"route:{endpoint.name}")
    if _publish_desired(queue):
        healed.append("desired")
    if healed:
        logger.info("reconciled what=%s", ",".join(healed))
    return healed


def readiness(*, endpoint: Endpoint, slots: Sequence[SlotStatus]) -> list[RoleReadiness]:
    """For each filled role: which slots hold its version, and in what state they are."""
    state = endpoint.to_state()
    roles = (("live", state.live), ("previous", state.previous), ("candidate", state.candidate))
    return [
        RoleReadiness(role, placed.name, _slots_of(slots, endpoint.name, placed.name))
        for role, placed in roles
        if placed is not None
    ]


def read_slots(*, queue: Queue) -> list[SlotStatus]:
    """Every slot that has reported lately."""
    return list_slots(queue)


def _apply(endpoint: Endpoint, queue: Queue) -> None:
    route = route_of(endpoint.to_state())
    if not queue.apply_route(route):
        raise RouteRefused(
            f"Redis holds a newer generation of endpoint {endpoint.name!r} than {route.generation}. If this "
            "database was restored from a backup, give the endpoint a new incarnation."
        )
    Endpoint.objects.filter(pk=endpoint.pk, published_generation__lt=route.generation).update(
        published_generation=route.generation
    )


def _publish_desired(queue: Queue) -> bool:
    residents = residents_of(endpoint.to_state() for endpoint in Endpoint.objects.with_versions())
    if queue.read_desired() == residents:
        return False
    queue.publish_desired(residents)
    return True


def _slots_of(slots: Sequence[SlotStatus], endpoint: str, version: str) -> tuple[SlotStatus, ...]:
    return tuple(slot for slot in slots if slot.endpoint == endpoint and slot.version == version)
