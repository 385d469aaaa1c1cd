"""Carrying out one move of a rollout: endpoint, rollout, step and event in one transaction, then the route.

A crash before the commit leaves nothing, one after it leaves a route that the relay publishes. Whoever comes second,
with a rollout that has moved since it was read, is told and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

from django.db import transaction
from django.db.models import F

from controlplane.endpoints import candidacy, moves
from controlplane.endpoints.candidacy import Traffic
from controlplane.endpoints.changes import Change
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.publication import publish_if_possible
from controlplane.endpoints.routing import EndpointState
from controlplane.endpoints.slots import Report, read_report
from controlplane.errors import DomainError
from controlplane.events.services import record
from controlplane.rollouts.decisions import Move
from controlplane.rollouts.machine import FINAL, State, Trigger, next_state
from controlplane.rollouts.models import Rollout, Step
from controlplane.rollouts.policy import Policy, parse_policy
from drift.verdict import Verdict
from inference.queue import Queue, QueueUnavailable

MAX_REASON = 500
# What the event of a move is called.
EVENTS = {
    Trigger.READY: "step_started",
    Trigger.ADVANCE: "step_started",
    Trigger.WEIGH: "weight_set",
    Trigger.PAUSE: "paused",
    Trigger.RESUME: "resumed",
    Trigger.ASK: "approval_requested",
    Trigger.APPROVE: "approved",
    Trigger.PASS: "promoted",
    Trigger.FORCE: "promoted",
    Trigger.BAKED: "succeeded",
    Trigger.COMPLETE: "completed",
    Trigger.HARM: "rolled_back",
    Trigger.ROLL_BACK: "rolled_back",
    Trigger.ABORT: "aborted",
    Trigger.EXPIRE: "expired",
    Trigger.FAIL: "failed",
    Trigger.SUPERSEDE: "superseded",
}
REJECTS = frozenset({Trigger.HARM, Trigger.ROLL_BACK})
# Only these leave what runs on the candidate in peace: nobody has said anything against it.
GENTLE = frozenset({Trigger.ABORT, Trigger.EXPIRE, Trigger.COMPLETE})
EndpointMove = Callable[[EndpointState], EndpointState]


class RolloutChanged(DomainError):
    """Somebody else moved the rollout first; look at it again and decide anew."""

    code = "rollout_changed"
    status = HTTPStatus.CONFLICT
    permanent = False


class HoldLost(DomainError):
    """Somebody moved the endpoint by hand; the next tick ends the rollout."""

    code = "hold_lost"
    status = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True)
class Readiness:
    """Who could answer. ``versions`` is None when Redis is away; ``missing`` says what the candidate lacks."""

    versions: frozenset[str] | None = None
    missing: str = ""
    force: bool = False


def readiness_of(rollout: Rollout, report: Report | None, *, force: bool = False) -> Readiness:
    """What a report says of who could answer on the endpoint of ``rollout``."""
    if report is None:
        return Readiness(None, "Redis is away, so nobody knows", force)
    name, candidate = rollout.endpoint.name, rollout.candidate.name
    missing = report.tell_missing(name, candidate, has_role=True)
    return Readiness(report.ready_versions(name), missing, force)


def read_readiness(rollout: Rollout, queue: Queue, *, force: bool = False) -> Readiness:
    """The same, of a report that is read now, if Redis can be asked."""
    try:
        report = read_report(queue=queue)
    except QueueUnavailable:
        report = None
    return readiness_of(rollout, report, force=force)


@dataclass(frozen=True, slots=True)
class By:
    """Who moves a rollout, and when."""

    actor: str
    now: datetime


def carry_out(
    *, rollout: Rollout, move: Move, by: By, queue: Queue, readiness: Readiness | None = None
) -> Rollout:
    """Make ``move``, and publish the route if it changed; returns the rollout as it is then.

    Raises:
        IllegalTransition: the move does not fit the state.
        RolloutChanged: somebody else was faster.
        HoldLost: the endpoint does not belong to the rollout any more.
        MoveRefused: the endpoint cannot be moved so now.
    """
    with transaction.atomic(durable=True):
        is_changed = write(rollout=rollout, move=move, by=by, readiness=readiness or Readiness())
    if is_changed:
        publish_if_possible(name=rollout.endpoint.name, queue=queue, now=by.now)
    return Rollout.objects.with_names().get(pk=rollout.pk)


def write(*, rollout: Rollout, move: Move, by: By, readiness: Readiness) -> bool:
    """The rows of ``carry_out``, in the caller's transaction; whether the route changed."""
    before = State(rollout.state)
    after = next_state(before, move.trigger)
    policy = parse_policy(rollout.document)
    change = Change(
        f"endpoint.{_endpoint_event(move.trigger)}",
        rollout.endpoint.name,
        by.actor,
        _fit(move.reason),
        by.now,
        [rollout.candidate, rollout.incumbent],
    )
    endpoint, is_changed = change.write(_endpoint_move(rollout, move, policy, by.now, readiness))
    _write_rollout(rollout, move, after, by, _traffic_after(rollout, move, after), endpoint)
    _write_steps(rollout, move, after, policy, by.now)
    record(
        type=f"rollout.{EVENTS[move.trigger]}",
        subject=rollout.subject,
        actor=by.actor,
        reason=_fit(move.reason),
        now=by.now,
        data=_tell(rollout, move, after, endpoint),
    )
    return is_changed


def _endpoint_move(
    rollout: Rollout, move: Move, policy: Policy, now: datetime, readiness: Readiness
) -> EndpointMove:
    """What the move means for the endpoint."""
    trigger, key, candidate = move.trigger, rollout.key, rollout.candidate.name

    def act(state: EndpointState) -> EndpointState:
        if trigger in _EXITS:
            return _take_back(state)
        if state.rollout != key:
            raise HoldLost(
                f"Endpoint {state.name!r} was moved by hand while rollout {key} ran; it ends as superseded."
            )
        if trigger in (Trigger.PASS, Trigger.FORCE):
            is_ready = candidate in (readiness.versions or ())
            return candidacy.promote(
                state, key, is_ready=is_ready, missing=readiness.missing, now=now
            )
        if trigger is Trigger.BAKED:
            return candidacy.let_go(state, key)
        return state if move.traffic is None else candidacy.set_traffic(state, key, move.traffic)

    def _take_back(state: EndpointState) -> EndpointState:
        wanted = "finish" if trigger in GENTLE else policy.in_flight or state.in_flight
        if rollout.state == State.PROMOTED:
            # It holds the endpoint no longer; if another version is live by now, nothing is left to take back.
            return moves.rollback(
                state,
                leave=candidate,
                target=None,
                ready=readiness.versions,
                force=readiness.force,
                now=now,
            )
        return candidacy.take_back(
            state,
            key,
            candidate,
            ready=None if readiness.force else readiness.versions,
            in_flight=wanted,
            is_rejected=trigger in REJECTS,
            now=now,
            standby_s=None if policy.standby_s is None else math.ceil(policy.standby_s),
        )

    return act


_EXITS = frozenset(
    {
        Trigger.COMPLETE,
        Trigger.HARM,
        Trigger.ROLL_BACK,
        Trigger.ABORT,
        Trigger.EXPIRE,
        Trigger.FAIL,
        Trigger.SUPERSEDE,
    }
)


def _endpoint_event(trigger: Trigger) -> str:
    if trigger in (Trigger.PASS, Trigger.FORCE):
        return "promoted"
    return "rolled_back" if trigger in _EXITS else "candidate_weighed"


def _traffic_after(rollout: Rollout, move: Move, after: State) -> Traffic:
    if after in FINAL or after is State.BAKING:
        return Traffic()
    if move.traffic is not None:
        return move.traffic
    return Traffic(rollout.canary_bp, rollout.shadow_bp, rollout.self_bp, rollout.score_bp)


def _write_rollout(
    rollout: Rollout, move: Move, after: State, by: By, traffic: Traffic, endpoint: Endpoint
) -> None:
    """The compare-and-set: state and version must be what they were when the rollout was read.

    Raises:
        RolloutChanged: they are not.
    """
    enters_step = move.step_index is not None
    values: dict[str, Any] = {
        "state": after,
        "version": F("version") + 1,
        "state_at": by.now,
        "why": "",
        "hold": move.hold,
        "is_released": move.is_released or (rollout.is_released and not enters_step),
        "weights": _weights(rollout, traffic, endpoint),
        **asdict(traffic),
    }
    if move.overrides is not None:
        values |= {"overrides": list(move.overrides)}
    if enters_step:
        values |= {"step_index": move.step_index, "step_at": by.now, "overrides": []}
    if after is State.BAKING:
        values |= {"promoted_at": by.now, "is_forced": move.trigger is Trigger.FORCE}
    if after in FINAL:
        values |= {"ended_at": by.now}
    if move.trigger is Trigger.APPROVE:
        values |= {"approved_by": by.actor}
    if not Rollout.objects.filter(
        pk=rollout.pk, state=rollout.state, version=rollout.version, decision=rollout.decision
    ).update(**values):
        raise RolloutChanged(
            f"Rollout {rollout.key} is no longer {rollout.state} at version {rollout.version}."
        )


def _weights(rollout: Rollout, traffic: Traffic, endpoint: Endpoint) -> list[list[int]]:
    """From which generation on the candidate had which share, with the new one if it is another."""
    last = rollout.weights[-1][1] if rollout.weights else 0
    if last == traffic.canary_bp:
        return list(rollout.weights)
    return [*rollout.weights, [endpoint.generation, traffic.canary_bp]]


def _write_steps(rollout: Rollout, move: Move, after: State, policy: Policy, now: datetime) -> None:
    """Leave the step that ends, and enter the next."""
    if move.step_index is None and after not in FINAL:
        return
    Step.objects.filter(rollout=rollout, left_at=None).update(
        left_at=now, outcome=move.trigger, why=_fit(move.reason)
    )
    if move.step_index is not None and move.step_index < len(policy.steps):
        kind = policy.steps[move.step_index].kind
        Step.objects.create(rollout=rollout, index=move.step_index, kind=kind, entered_at=now)


def _tell(rollout: Rollout, move: Move, after: State, endpoint: Endpoint) -> dict[str, Any]:
    """What the event says beside its reason."""
    return {
        "endpoint": rollout.endpoint.name,
        "candidate": rollout.candidate.name,
        "incumbent": rollout.incumbent.name,
        "trigger": str(move.trigger),
        "was": str(rollout.state),
        "state": str(after),
        "version": rollout.version + 1,
        "step": rollout.step_index if move.step_index is None else move.step_index,
        "verdict": rollout.verdict,
        "generation": endpoint.generation,
        "live": endpoint.live.name,
        "canary_bp": endpoint.canary_bp,
        "shadow_bp": endpoint.shadow_bp,
        "failed": _failed_gates(rollout) if move.trigger is Trigger.HARM else [],
    }


def _failed_gates(rollout: Rollout) -> list[dict[str, Any]]:
    """The gates and segments that the last look has named."""
    last = rollout.looks.order_by("-number").first()
    return [
        {name: result[name] for name in ("metric", "segment", "name", "sentence")}
        for result in (last.results if last else ())
        if result["verdict"] == Verdict.FAIL
    ]


def _fit(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 1]}…"
