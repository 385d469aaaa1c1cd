"""Bringing Redis to what the database says: after a change, from the outbox, and by comparing the two.

All of it may be repeated, run at once, come late or in another order, and ends in the same state.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from http import HTTPStatus

from django.conf import settings
from django.db import transaction

from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.routing import residents_of, route_of
from controlplane.errors import DomainError
from controlplane.events.models import Outbox
from controlplane.events.services import record
from inference.protocol import Route
from inference.queue import Queue, QueueUnavailable

logger = logging.getLogger(__name__)

TOPIC = "route"
RELAY_BATCH = 100
# A route is refused when another change was faster; each try reads the newest row.
ATTEMPTS = 5


class RouteRefused(DomainError):
    """Redis kept holding a newer route than the database; the reconciler goes on trying."""

    code = "route_refused"
    status = HTTPStatus.CONFLICT
    permanent = False


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication did.

    ``requeued`` entries moved to the live version, ``in_flight`` ones still run on a version without a route.
    ``applied_at`` is when Redis had the route, on ``time.perf_counter()``.
    """

    generation: int
    requeued: int
    in_flight: int
    applied_at: float


@cache
def connection() -> Queue:
    """The connections of this process to Redis, opened at first use."""
    return Queue(settings.REDIS_URL)


def publish(*, name: str, queue: Queue, now: datetime) -> Published:
    """Apply the newest committed route of ``name`` to Redis, then what slots should hold.

    Raises:
        QueueUnavailable: Redis is away; ``relay`` and ``reconcile`` try again.
        RouteRefused: others changed the route faster than it could be applied.
    """
    published = _apply_newest(name, queue, now)
    _publish_desired(queue)
    return published


def publish_if_possible(*, name: str, queue: Queue, now: datetime) -> Published | None:
    """As ``publish``; None while that cannot be, and then ``relay`` and ``reconcile`` see to it."""
    try:
        return publish(name=name, queue=queue, now=now)
    except (QueueUnavailable, RouteRefused) as error:
        logger.warning("published later endpoint=%s error=%s", name, error)
        return None


def relay(*, queue: Queue, now: datetime) -> int:
    """Carry out the route changes that wait in the outbox; returns how many are done.

    The newest row is published for each endpoint, which settles its older entries as well.
    """
    waiting = list(Outbox.objects.waiting(TOPIC)[:RELAY_BATCH])
    num_done = 0
    for subject in dict.fromkeys(row.subject for row in waiting):
        try:
            publish(name=subject.removeprefix("endpoint:"), queue=queue, now=now)
        except RouteRefused:
            # The next tick tries again; the routes of other endpoints must not wait with it.
            logger.exception("route refused subject=%s", subject)
            continue
        ids = [row.pk for row in waiting if row.subject == subject]
        num_done += Outbox.objects.filter(pk__in=ids, done_at=None).update(done_at=now)
    return num_done


def reconcile(*, queue: Queue, now: datetime) -> list[str]:
    """Compare every route and the desired residents with Redis, publish what differs, and name it.

    It reads and writes whole states, so an emptied Redis is full again after one call, and a database that went
    back in time has the last word, under a new incarnation.
    """
    # Redis is read before the rows: a route is committed before it is applied, so that a row read afterwards can
    # only be older than its route if the database lost a commit.
    routed = queue.read_endpoints()
    names = list(Endpoint.objects.values_list("name", flat=True))
    seen = {name: queue.read_route(name) for name in names}
    healed = []
    for name in sorted(set(routed) - set(names)):
        # Endpoints are never deleted: an older database was restored, and nobody could move this route any more.
        queue.withdraw_route(name)
        logger.warning("route withdrawn, the database has no such endpoint endpoint=%s", name)
        healed.append(f"withdrawn:{name}")
    for endpoint in Endpoint.objects.with_versions():
        if endpoint.is_published and seen.get(endpoint.name) == route_of(endpoint.to_state()):
            continue
        try:
            _apply_newest(endpoint.name, queue, now)
        except RouteRefused:
            logger.exception("route refused endpoint=%s", endpoint.name)
            continue
        healed.append(f"route:{endpoint.name}")
    if _publish_desired(queue):
        healed.append("desired")
    if healed:
        logger.info("reconciled what=%s", ",".join(healed))
    return healed


def _apply_newest(name: str, queue: Queue, now: datetime) -> Published:
    for _ in range(ATTEMPTS):
        endpoint = Endpoint.objects.with_versions().get(name=name)
        state = endpoint.to_state()
        applied = queue.apply_route(route_of(state), in_flight=state.ending)
        if applied.is_current:
            applied_at = time.perf_counter()
            _confirm(endpoint)
            return Published(
                state.generation, applied.num_requeued, applied.num_in_flight, applied_at
            )
        if (route := queue.read_route(name)) is not None:
            _renew_incarnation(name, route, now)
    raise RouteRefused(f"The route of endpoint {name!r} changes faster than it can be applied.")


def _confirm(endpoint: Endpoint) -> None:
    Endpoint.objects.filter(pk=endpoint.pk, published_generation__lt=endpoint.generation).update(
        published_generation=endpoint.generation
    )


@transaction.atomic
def _renew_incarnation(name: str, route: Route, now: datetime) -> None:
    """Begin anew if the database went back behind ``route``, which was read from Redis before this call."""
    endpoint = Endpoint.objects.select_for_update().get(name=name)
    is_behind = (
        str(endpoint.incarnation) == route.incarnation and endpoint.generation < route.generation
    )
    if not is_behind:
        return
    was = endpoint.generation
    endpoint.incarnation = uuid.uuid4()
    endpoint.generation = route.generation + 1
    endpoint.updated_at = now
    endpoint.save(update_fields=["incarnation", "generation", "updated_at"])
    record(
        type="endpoint.incarnation_changed",
        subject=f"endpoint:{name}",
        actor="reconciler",
        reason="the database is older than the route that was served",
        now=now,
        data={"generation": endpoint.generation, "database": was, "redis": route.generation},
        topic=TOPIC,
    )
    logger.warning(
        "database went back in time endpoint=%s database=%d redis=%d", name, was, route.generation
    )


def _publish_desired(queue: Queue) -> bool:
    """Whether anything had to change. It looks again after it wrote: another may have written an older list."""
    for attempt in range(ATTEMPTS):
        endpoints = Endpoint.objects.with_versions()
        residents = residents_of(endpoint.to_state() for endpoint in endpoints)
        if queue.read_desired() == residents:
            return attempt > 0
        queue.publish_desired(residents)
    return True
