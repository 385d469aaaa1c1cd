"""Starting a rollout: what is checked, what is frozen, and the rows that stand for it."""

from __future__ import annotations

from datetime import datetime, timedelta
from http import HTTPStatus

from django.db import IntegrityError, transaction

from controlplane.endpoints import candidacy
from controlplane.endpoints.capacity import DoesNotFit, check_candidate
from controlplane.endpoints.changes import Change, UnknownEndpoint
from controlplane.endpoints.models import Endpoint, place
from controlplane.endpoints.moves import HeldByRollout
from controlplane.endpoints.publication import publish_if_possible
from controlplane.endpoints.services import ReadinessUnknown, find_version
from controlplane.endpoints.slots import read_report
from controlplane.errors import DomainError
from controlplane.events.services import record
from controlplane.registry.models import Version
from controlplane.rollouts.checks import FitsAsCandidate, Room, fits_as_candidate
from controlplane.rollouts.freezing import freeze, frozen_document
from controlplane.rollouts.models import Rollout, Step
from controlplane.rollouts.policies import find_policy
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.transitions import By
from inference.queue import Queue, QueueUnavailable


class RolloutActive(DomainError):
    """An endpoint has one rollout at a time."""

    code = "rollout_active"
    status = HTTPStatus.CONFLICT


class VersionRejected(DomainError):
    """The version was taken back on this endpoint before."""

    code = "version_rejected"
    status = HTTPStatus.CONFLICT


def start(
    *,
    endpoint: str,
    candidate: str,
    policy: str,
    actor: str,
    now: datetime,
    queue: Queue,
    reason: str = "",
    takes_rejected: bool = False,
    attempt: int = 1,
    fits: FitsAsCandidate = fits_as_candidate,
) -> Rollout:
    """Make ``candidate`` the candidate of ``endpoint``, under ``policy`` (``name`` or ``name/version``).

    Policy, segments and limits are frozen now. Slots load the candidate, and ticks do the rest.

    Raises:
        UnknownEndpoint, UnknownVersion, VersionNotReady, UnknownPolicy: something that was named is not there.
        RolloutActive: the endpoint has an active rollout.
        VersionRejected: the version was taken back here; ``takes_rejected`` with a reason starts it all the same.
        DoesNotFit: no slot is left for it, or it clearly cannot be loaded beside what is resident.
        ReadinessUnknown: Redis is away, so nobody knows.
        CandidateIsLive, HeldByRollout: the endpoint cannot take it.
    """
    version = find_version(candidate)
    chosen = find_policy(policy, now=now)
    row = _endpoint(endpoint)
    _check_rejected(row, version, takes_rejected=takes_rejected, reason=reason)
    _check_room(row, version, fits, queue)
    document = frozen_document(chosen.document)
    rules = parse_policy(document)
    frozen = freeze(policy=rules, endpoint=row.name, incumbent=row.live.name, now=now)
    rollout = Rollout(
        endpoint=row,
        incumbent=row.live,
        candidate=version,
        policy=chosen,
        document=document,
        plan=frozen.plan,
        limits=frozen.limits,
        forecast=frozen.forecast,
        notices=frozen.notices,
        sealed_block=int(now.timestamp() // rules.block_s),
        looked_block=int(now.timestamp() // rules.block_s),
        attempt=attempt,
        created_by=actor,
        reason=reason,
        created_at=now,
        state_at=now,
        step_at=now,
        deadline_at=now + timedelta(seconds=rules.deadline_s),
    )
    with transaction.atomic(durable=True):
        _insert(rollout, By(actor, now))
    publish_if_possible(name=endpoint, queue=queue, now=now)
    return Rollout.objects.with_names().get(pk=rollout.pk)


def _endpoint(name: str) -> Endpoint:
    endpoint = Endpoint.objects.with_versions().filter(name=name).first()
    if endpoint is None:
        raise UnknownEndpoint(f"There is no endpoint {name!r}.")
    return endpoint


def _check_rejected(
    endpoint: Endpoint, version: Version, *, takes_rejected: bool, reason: str
) -> None:
    if version.name not in endpoint.to_state().rejected or (takes_rejected and reason.strip()):
        return
    raise VersionRejected(
        f"{version.name} was taken back on endpoint {endpoint.name!r}; to try it again, name it as rejected and give a "
        "reason."
    )


def _check_room(endpoint: Endpoint, version: Version, fits: FitsAsCandidate, queue: Queue) -> None:
    try:
        report = read_report(queue=queue)
    except QueueUnavailable as error:
        raise ReadinessUnknown(
            f"Redis is away, so nobody knows whether a slot is left for {version.name}; try again.",
            retry_after_s=5,
        ) from error
    check_candidate(version, endpoint=endpoint, report=report)
    states = tuple(each.to_state() for each in Endpoint.objects.with_versions())
    room = Room(endpoint.name, version.name, version.size_bytes, states, report)
    if told := fits(room):
        raise DoesNotFit(f"{version.name} cannot be loaded for endpoint {endpoint.name!r}: {told}")


def _insert(rollout: Rollout, by: By) -> None:
    """The rows of a start: endpoint, rollout, its first step, and the event."""
    change = Change(
        "endpoint.candidate_set",
        rollout.endpoint.name,
        by.actor,
        rollout.reason,
        by.now,
        [rollout.candidate],
    )
    endpoint = _hold(rollout, change)
    rollout.incumbent = endpoint.live
    try:
        with transaction.atomic():
            rollout.save(force_insert=True)
    except IntegrityError as error:
        raise RolloutActive(_told_active(rollout)) from error
    Step.objects.create(rollout=rollout, index=-1, kind="prepare", entered_at=by.now)
    record(
        type="rollout.created",
        subject=rollout.subject,
        actor=by.actor,
        reason=rollout.reason,
        now=by.now,
        data={
            "endpoint": endpoint.name,
            "candidate": rollout.candidate.name,
            "incumbent": endpoint.live.name,
            "policy": str(rollout.policy),
            "state": str(rollout.state),
            "version": rollout.version,
            "attempt": rollout.attempt,
            "generation": endpoint.generation,
        },
    )


def _hold(rollout: Rollout, change: Change) -> Endpoint:
    try:
        return change.write(
            lambda state: candidacy.hold(state, place(rollout.candidate), rollout.key)
        )[0]
    except HeldByRollout as error:
        if Rollout.objects.active().of_endpoint(rollout.endpoint.name).exists():
            raise RolloutActive(_told_active(rollout)) from error
        raise


def _told_active(rollout: Rollout) -> str:
    other = Rollout.objects.active().of_endpoint(rollout.endpoint.name).first()
    return (
        f"Rollout {other} is active on endpoint {rollout.endpoint.name!r}; an endpoint has one at a time. Abort it, or "
        "wait until it has ended."
    )
