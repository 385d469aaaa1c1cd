"""Changing where endpoints lead.

Every change is one transaction (row, generation, event, outbox), and then a publication. When Redis is away the
change stands all the same, and ``relay`` and ``reconcile`` publish it as soon as they can.
"""

from __future__ import annotations

import time
from datetime import datetime
from http import HTTPStatus

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.endpoints import capacity, moves
from controlplane.endpoints.changes import (
    STANDBY_ENDED,
    Change,
    Changed,
    UnknownEndpoint,
    record_change,
)
from controlplane.endpoints.models import Endpoint, make_salt, place
from controlplane.endpoints.moves import Settings
from controlplane.endpoints.publication import publish_if_possible
from controlplane.endpoints.routing import ROLES, EndpointState, names_of
from controlplane.endpoints.slots import read_report
from controlplane.errors import DomainError
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.registry.models import Version
from inference.queue import Queue, QueueUnavailable


class EndpointExists(DomainError):
    """The name is taken."""

    code = "endpoint_exists"
    status = HTTPStatus.CONFLICT


class InvalidEndpoint(DomainError):
    """An endpoint cannot be as described."""

    code = "invalid_endpoint"
    status = HTTPStatus.BAD_REQUEST


class UnknownVersion(DomainError):
    """No version has that name."""

    code = "unknown_version"
    status = HTTPStatus.BAD_REQUEST


class VersionNotReady(DomainError):
    """Only a version whose artifact is ready can serve."""

    code = "version_not_ready"
    status = HTTPStatus.CONFLICT
    permanent = False


class ReadinessUnknown(DomainError):
    """Redis is away, so nobody knows which versions could answer."""

    code = "readiness_unknown"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    permanent = False


class UnknownEvent(DomainError):
    """There is no such event of this endpoint."""

    code = "unknown_event"
    status = HTTPStatus.NOT_FOUND


def create(
    *,
    name: str,
    live: Version,
    actor: str,
    now: datetime,
    reason: str = "",
    settings: Settings | None = None,
) -> Endpoint:
    """Add an endpoint that leads to ``live``; the relay publishes it, or who cannot wait calls ``publish``.

    Raises:
        VersionNotReady: the artifact of ``live`` is not there yet.
        InvalidEndpoint: the name or a setting is out of range.
        EndpointExists: the name is taken.
    """
    _check_artifact(live)
    values = (settings or Settings()).changes()
    endpoint = Endpoint(name=name, live=live, created_at=now, updated_at=now, **values)
    _check_fields(endpoint)
    with transaction.atomic():
        try:
            with transaction.atomic():
                endpoint.save(force_insert=True)
        except IntegrityError as error:
            raise EndpointExists(
                f"Endpoint {name!r} exists already; choose another name."
            ) from error
        data = {"generation": endpoint.generation, "live": live.name}
        record_change("endpoint.created", name, actor=actor, reason=reason, now=now, data=data)
    return endpoint


def create_and_publish(
    *,
    name: str,
    live: str,
    actor: str,
    now: datetime,
    queue: Queue,
    reason: str = "",
    settings: Settings | None = None,
) -> Endpoint:
    """As ``create``, with the version by name, and published at once if Redis is there.

    Raises:
        UnknownVersion: there is no version ``live``; else as ``create``.
    """
    version = find_version(live)
    create(name=name, live=version, actor=actor, now=now, reason=reason, settings=settings)
    publish_if_possible(name=name, queue=queue, now=now)
    return Endpoint.objects.with_versions().get(name=name)


def promote(
    *,
    name: str,
    version: str,
    actor: str,
    reason: str,
    now: datetime,
    queue: Queue,
    expected_generation: int | None = None,
) -> Changed:
    """Make ``version`` live, and the version that was live the way back. Naming the live version changes nothing.

    Raises:
        StaleGeneration: the endpoint is not at ``expected_generation``.
        VersionNotResident: no slot could answer with it.
        ReadinessUnknown: Redis is away.
        UnknownEndpoint, UnknownVersion, VersionNotReady: there is nothing to promote.
    """
    started_at = time.perf_counter()
    target = find_version(version)
    try:
        report = read_report(queue=queue)
    except QueueUnavailable as error:
        raise ReadinessUnknown(
            f"Redis is away, so nobody knows whether {version} could answer; try again.",
            retry_after_s=5,
        ) from error

    def move(state: EndpointState) -> EndpointState:
        moves.check_generation(state, expected_generation)
        return moves.promote(
            state,
            place(target),
            is_ready=target.name in report.ready_versions(name),
            missing=report.tell_missing(name, target.name, has_role=target.name in names_of(state)),
            now=now,
        )

    change = Change("endpoint.promoted", name, actor, reason, now, [target])
    return change.publish(*change.commit(move), queue, started_at)


def rollback(
    *,
    name: str,
    actor: str,
    now: datetime,
    queue: Queue,
    from_version: str | None = None,
    to_version: str | None = None,
    reason: str = "",
    force: bool = False,
) -> Changed:
    """Take ``from_version`` (the live one, when nothing is named) back, at once.

    Keyed by the version it leaves: when that is not live, somebody was faster and nothing changes. A repeat of a call
    that names nothing changes nothing either. A Redis that is away does not hold it up.

    Raises:
        NothingToRollBackTo: no version is kept, and none was named.
        PreviousNotReady: only the live version could answer; ``force`` overrules.
        UnknownEndpoint, UnknownVersion, VersionNotReady: what was named is not there.
    """
    started_at = time.perf_counter()
    leave = from_version or _live_of(name)
    target = find_version(to_version) if to_version else None
    ready = _ready_if_known(name, queue)

    def move(state: EndpointState) -> EndpointState:
        to = place(target) if target else None
        return moves.rollback(
            state,
            leave=leave,
            target=to,
            ready=ready,
            force=force,
            now=now,
            names_nothing=not (from_version or to_version),
        )

    versions = [target] if target else []
    change = Change("endpoint.rolled_back", name, actor, reason, now, versions)
    return change.publish(*change.commit(move), queue, started_at)


def configure(
    *,
    name: str,
    actor: str,
    now: datetime,
    queue: Queue,
    candidate: str | None = None,
    canary_bp: int | None = None,
    settings: Settings | None = None,
    reason: str = "",
    expected_generation: int | None = None,
) -> Changed:
    """Change candidate, canary share and settings as one change; what is None stays as it is, "" is no candidate.

    Raises:
        StaleGeneration: the endpoint is not at ``expected_generation``.
        CandidateIsLive, NoCandidate: the candidate or its share cannot be.
        DoesNotFit: a new candidate clearly cannot be loaded beside what is resident.
        InvalidEndpoint: a setting is out of range.
        UnknownEndpoint, UnknownVersion, VersionNotReady: what was named is not there.
    """
    started_at = time.perf_counter()
    settings = settings or Settings()
    version = find_version(candidate) if candidate else None
    if version is not None:
        _check_fits(version, name, queue)
    _check_fields(Endpoint(name=name, canary_bp=canary_bp or 0, **settings.changes()))

    def move(state: EndpointState) -> EndpointState:
        moves.check_generation(state, expected_generation)
        wanted = state.candidate if candidate is None else (place(version) if version else None)
        moved = moves.set_candidate(state, wanted, canary_bp=canary_bp, salt=make_salt())
        return moves.in_one(state, moves.configure(moved, settings))

    type_of_event = _type_of(candidate, settings)
    change = Change(type_of_event, name, actor, reason, now, [version] if version else [])
    return change.publish(*change.commit(move), queue, started_at)


def set_candidate(
    *, name: str, version: str | None, actor: str, now: datetime, queue: Queue, reason: str = ""
) -> Changed:
    """Let slots load and warm ``version`` without traffic; None lets the candidate go."""
    return configure(
        name=name, candidate=version or "", actor=actor, now=now, queue=queue, reason=reason
    )


def set_canary(
    *, name: str, canary_bp: int, actor: str, now: datetime, queue: Queue, reason: str = ""
) -> Changed:
    """Give the candidate ``canary_bp`` of 10,000 requests."""
    return configure(
        name=name, canary_bp=canary_bp, actor=actor, now=now, queue=queue, reason=reason
    )


def annotate(*, name: str, sequence: int, reason: str, actor: str, now: datetime) -> Event:
    """Add the reason for a change that was made in a hurry, as an event about the event.

    Raises:
        UnknownEvent: the endpoint has no event of that number.
    """
    if not Event.objects.about(f"endpoint:{name}").filter(sequence=sequence).exists():
        raise UnknownEvent(f"Endpoint {name!r} has no event {sequence}.")
    with transaction.atomic():
        return record(
            type="endpoint.annotated",
            subject=f"endpoint:{name}",
            actor=actor,
            reason=reason,
            now=now,
            data={"event": sequence},
        )


def expire_standby(*, queue: Queue, now: datetime) -> list[str]:
    """Let retired versions go whose standby is over; the names of their endpoints."""
    names = list(Endpoint.objects.with_standby_over(now).values_list("name", flat=True))
    for name in names:
        change = Change(STANDBY_ENDED, name, "beat", "the standby time is over", now, [])
        change.publish(
            *change.commit(lambda state: moves.end_standby(state, now)), queue, time.perf_counter()
        )
    return names


def find_version(name: str) -> Version:
    """The version ``model/number`` with its artifact.

    Raises:
        UnknownVersion: there is none.
        VersionNotReady: its artifact is not there yet, or could not be made.
    """
    version = Version.objects.named(name).select_related("model").first()
    if version is None:
        raise UnknownVersion(f"There is no version {name!r}; versions are named model/number.")
    _check_artifact(version)
    return version


def _live_of(name: str) -> str:
    endpoint = Endpoint.objects.select_related("live__model").filter(name=name).first()
    if endpoint is None:
        raise UnknownEndpoint(f"There is no endpoint {name!r}.")
    return endpoint.live.name


def _ready_if_known(name: str, queue: Queue) -> frozenset[str] | None:
    try:
        return read_report(queue=queue).ready_versions(name)
    except QueueUnavailable:
        return None


def _check_fits(version: Version, name: str, queue: Queue) -> None:
    endpoint = Endpoint.objects.with_versions().filter(name=name).first()
    if endpoint is None or endpoint.candidate == version or endpoint.live == version:
        return
    try:
        report = read_report(queue=queue)
    except QueueUnavailable:
        report = None
    capacity.check_candidate(version, endpoint=endpoint, report=report)


def _check_artifact(version: Version) -> None:
    if not version.is_ready:
        raise VersionNotReady(f"Version {version.name} is {version.state}; wait until it is ready.")


def _check_fields(endpoint: Endpoint) -> None:
    try:
        endpoint.clean_fields(exclude=[*ROLES, "created_at", "updated_at"])
    except ValidationError as error:
        told = "; ".join(
            f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items()
        )
        raise InvalidEndpoint(f"Endpoint {endpoint.name!r}: {told}") from error


def _type_of(candidate: str | None, settings: Settings) -> str:
    if settings.changes():
        return "endpoint.configured"
    return "endpoint.canary_set" if candidate is None else "endpoint.candidate_set"
