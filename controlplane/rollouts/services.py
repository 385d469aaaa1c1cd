"""What people do with rollouts. Each call is one move; what rollouts do by themselves is in ``loop``.

Every call takes the ``key`` of a rollout, says who (``actor``) and why, and returns the rollout as it is afterwards.
"""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus

from controlplane.access.models import ROLES
from controlplane.endpoints.candidacy import Traffic
from controlplane.errors import DomainError
from controlplane.rollouts.checks import FitsAsCandidate, fits_as_candidate
from controlplane.rollouts.decisions import HOLD_GATE, HOLD_MANUAL, HOLD_STEP, Move
from controlplane.rollouts.gates import Decision
from controlplane.rollouts.judging import failing_gates
from controlplane.rollouts.machine import FINAL, TRANSITIONS, IllegalTransition, State, Trigger
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.starting import start as start  # one of the actions
from controlplane.rollouts.steps import Kind, largest_bp
from controlplane.rollouts.transitions import By, RolloutChanged, carry_out, read_readiness
from inference.queue import Queue

APPROVER = "approver"
# Each time somebody else must have moved the rollout, and it has few states to go through.
ATTEMPTS = 5


class UnknownRollout(DomainError):
    """There is no such rollout."""

    code = "unknown_rollout"
    status = HTTPStatus.NOT_FOUND


class NotAllowed(DomainError):
    """The role of the caller, or its being the author, forbids it."""

    code = "not_allowed"
    status = HTTPStatus.FORBIDDEN


class ReasonMissing(DomainError):
    """What overrules a rule says why."""

    code = "reason_missing"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class WeightRefused(DomainError):
    """A share is never above what the policy has decided on so far."""

    code = "weight_refused"
    status = HTTPStatus.CONFLICT


def pause(*, key: str, actor: str, now: datetime, queue: Queue, reason: str = "") -> Rollout:
    """Hold the rollout where it is, with its traffic; gates and deadlines go on."""
    move = Move(Trigger.PAUSE, reason, hold=HOLD_MANUAL)
    return carry_out(rollout=find(key), move=move, by=By(actor, now), queue=queue)


def resume(*, key: str, actor: str, now: datetime, queue: Queue, reason: str = "") -> Rollout:
    """Let a paused rollout go on: past a step that waits, or with a gate that failed and is not critical.

    Such a gate is overruled until the step ends, and the failed gate still forbids a promotion by the gates.

    Raises:
        ReasonMissing: a failed gate is overruled without a reason.
    """
    rollout = find(key)
    if rollout.hold == HOLD_GATE and not reason.strip():
        raise ReasonMissing(f"Rollout {key} is held by a failed gate; say why it should go on.")
    move = Move(
        Trigger.RESUME,
        reason,
        is_released=rollout.hold == HOLD_STEP,
        overrides=failing_gates(rollout) if rollout.hold == HOLD_GATE else None,
    )
    return carry_out(rollout=rollout, move=move, by=By(actor, now), queue=queue)


def approve(
    *, key: str, actor: str, role: str, now: datetime, queue: Queue, reason: str = ""
) -> Rollout:
    """Let a rollout go on that waits for an approval.

    Raises:
        NotAllowed: the caller is no approver, or the author.
    """
    rollout = find(key)
    _check_approver(rollout, actor, role)
    move = Move(Trigger.APPROVE, reason, is_released=True)
    return carry_out(rollout=rollout, move=move, by=By(actor, now), queue=queue)


def promote(
    *, key: str, actor: str, role: str, now: datetime, queue: Queue, reason: str = ""
) -> Rollout:
    """Make the candidate live before its steps are done.

    When every gate has passed and no approval is to come, any engineer may. Else it is forced, which only an approver
    may who is not the author, and who says why.

    Raises:
        NotAllowed: it would be forced, by somebody who may not.
        ReasonMissing: it is forced without a reason.
        VersionNotResident: no slot could answer with the candidate.
    """
    rollout = find(key)
    trigger = Trigger.PASS if may_pass(rollout) else Trigger.FORCE
    if trigger is Trigger.FORCE:
        _check_approver(rollout, actor, role)
        if not reason.strip():
            raise ReasonMissing(f"The gates have not passed rollout {key}; say why it is forced.")
    rules = parse_policy(rollout.document)
    last = len(rules.steps) - 1
    has_bake = last >= 0 and rules.steps[last].kind is Kind.BAKE
    move = Move(
        trigger, reason or rollout.verdict_reason, step_index=last if has_bake else last + 1
    )
    return carry_out(
        rollout=rollout,
        move=move,
        by=By(actor, now),
        queue=queue,
        readiness=read_readiness(rollout, queue),
    )


def abort(*, key: str, actor: str, now: datetime, queue: Queue, reason: str = "") -> Rollout:
    """End the rollout; the incumbent answers. The candidate is not rejected. A repeat changes nothing."""
    return _exit(find(key), Trigger.ABORT, By(actor, now), queue, reason or "aborted")


def rollback(
    *,
    key: str,
    actor: str,
    now: datetime,
    queue: Queue,
    reason: str = "",
    force: bool = False,
) -> Rollout:
    """Take the candidate back, wherever the rollout stands, and reject it. Needs nothing, and may be repeated.

    After a promotion the incumbent is live again, as long as the candidate is live and the incumbent is kept.

    Raises:
        PreviousNotReady: the candidate is live and answers, and the incumbent could not; ``force`` overrules.
        NothingToRollBackTo: the incumbent is not kept any more.
    """
    by, told = By(actor, now), reason or "rolled back"
    return _exit(find(key), Trigger.ROLL_BACK, by, queue, told, force=force)


def retry(
    *,
    key: str,
    actor: str,
    now: datetime,
    queue: Queue,
    reason: str = "",
    fits: FitsAsCandidate = fits_as_candidate,
) -> Rollout:
    """Start again what has ended on the incumbent's side: a new rollout, with the newest version of its policy.

    Nothing that was counted is taken over. A version that was rejected needs a reason.

    Raises:
        IllegalTransition: it has not ended, or was promoted; else as ``start``.
    """
    rollout = find(key)
    if rollout.state not in FINAL or rollout.state == State.PROMOTED:
        raise IllegalTransition(f"Rollout {key} is {rollout.state}; there is nothing to try again.")
    return start(
        endpoint=rollout.endpoint.name,
        candidate=rollout.candidate.name,
        policy=rollout.policy.name,
        actor=actor,
        now=now,
        queue=queue,
        reason=reason,
        takes_rejected=bool(reason.strip()),
        attempt=rollout.attempt + 1,
        fits=fits,
    )


def set_weight(
    *, key: str, canary_bp: int, actor: str, now: datetime, queue: Queue, reason: str = ""
) -> Rollout:
    """Give the candidate ``canary_bp`` of 10,000 requests until the next step.

    Raises:
        WeightRefused: more than the steps reached so far have decided on.
    """
    rollout = find(key)
    allowed = largest_bp(parse_policy(rollout.document).steps, rollout.step_index)
    if not 0 <= canary_bp <= allowed:
        raise WeightRefused(
            f"canary_bp={canary_bp} is refused: the steps that rollout {key} has reached allow 0 to {allowed}.",
            details={"allowed": allowed},
        )
    traffic = Traffic(canary_bp, rollout.shadow_bp, rollout.self_bp, rollout.score_bp)
    move = Move(Trigger.WEIGH, reason, traffic=traffic, hold=rollout.hold)
    return carry_out(rollout=rollout, move=move, by=By(actor, now), queue=queue)


def find(key: str) -> Rollout:
    """The rollout with its names.

    Raises:
        UnknownRollout: there is none.
    """
    rollout = Rollout.objects.with_names().filter(key=key).first()
    if rollout is None:
        raise UnknownRollout(f"There is no rollout {key!r}.")
    return rollout


def may_pass(rollout: Rollout) -> bool:
    """Whether the gates alone allow a promotion now."""
    policy = parse_policy(rollout.document)
    ahead = policy.steps[rollout.step_index + (1 if rollout.is_released else 0) :]
    needs_approval = any(step.kind is Kind.APPROVAL for step in ahead)
    is_running = rollout.state in (State.PROGRESSING, State.PAUSED)
    return (
        is_running
        and policy.promotes
        and rollout.decision == Decision.PROMOTE
        and not needs_approval
    )


def _exit(
    rollout: Rollout, trigger: Trigger, by: By, queue: Queue, reason: str, *, force: bool = False
) -> Rollout:
    """End the rollout unless it has ended; that somebody moves it at the same time is no reason not to."""
    readiness = read_readiness(rollout, queue, force=force)
    for _ in range(ATTEMPTS):
        if (State(rollout.state), trigger) not in TRANSITIONS:
            break
        try:
            return carry_out(
                rollout=rollout,
                move=Move(trigger, reason),
                by=by,
                queue=queue,
                readiness=readiness,
            )
        except RolloutChanged:
            rollout = find(rollout.key)
    return rollout


def _check_approver(rollout: Rollout, actor: str, role: str) -> None:
    if role not in ROLES or ROLES.index(role) < ROLES.index(APPROVER):
        raise NotAllowed(f"Only the role {APPROVER} may do that; this caller has {role or 'none'}.")
    if actor == rollout.created_by:
        raise NotAllowed(f"{actor} started rollout {rollout.key}; somebody else has to approve it.")
