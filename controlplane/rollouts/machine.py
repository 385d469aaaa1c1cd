"""The states of a rollout, and what leads from one to the next: one table, and nothing beside it."""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus

from controlplane.errors import DomainError


class State(StrEnum):
    """Where a rollout stands. What the gates say of its candidate is another matter, kept beside it."""

    PREPARING = "preparing"  # slots load and warm the candidate
    PROGRESSING = "progressing"  # one of the steps of the policy
    PAUSED = "paused"  # held by somebody, by a step, or by the gates, which go on
    AWAITING_APPROVAL = "awaiting_approval"
    BAKING = "baking"  # the candidate is live, and is watched beside the warm incumbent

    PROMOTED = "promoted"
    COMPLETED = "completed"  # judged, by a policy that does not promote
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    EXPIRED = "expired"  # a deadline passed without a verdict
    FAILED = "failed"  # the candidate could not serve
    SUPERSEDED = "superseded"  # somebody moved the endpoint by hand


class Trigger(StrEnum):
    """What moves a rollout."""

    READY = "ready"
    ADVANCE = "advance"
    WEIGH = "weigh"  # somebody sets the share, within what the policy has decided
    PAUSE = "pause"
    RESUME = "resume"
    ASK = "ask"
    APPROVE = "approve"
    PASS = "pass"  # noqa: S105 (a verdict): every gate of the policy was passed, and the last step is done
    FORCE = "force"  # an approver promotes without that, and says why
    BAKED = "baked"
    COMPLETE = "complete"
    HARM = "harm"  # a verdict: the candidate is worse
    ROLL_BACK = "roll_back"  # somebody wants the incumbent back
    ABORT = "abort"
    EXPIRE = "expire"
    FAIL = "fail"
    SUPERSEDE = "supersede"


ACTIVE = frozenset(
    {State.PREPARING, State.PROGRESSING, State.PAUSED, State.AWAITING_APPROVAL, State.BAKING}
)
FINAL = frozenset(State) - ACTIVE
# After these the incumbent answers, and the candidate has no traffic. SUPERSEDED is where somebody else decided.
INCUMBENT_SIDE = FINAL - {State.PROMOTED, State.SUPERSEDED}

# Ways out that need nothing: they lead to the incumbent from wherever a rollout stands.
EXITS = {
    Trigger.HARM: State.ROLLED_BACK,
    Trigger.ROLL_BACK: State.ROLLED_BACK,
    Trigger.ABORT: State.ABORTED,
    Trigger.EXPIRE: State.EXPIRED,
    Trigger.FAIL: State.FAILED,
    Trigger.SUPERSEDE: State.SUPERSEDED,
}

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.PREPARING, Trigger.READY): State.PROGRESSING,
    (State.PROGRESSING, Trigger.ADVANCE): State.PROGRESSING,
    (State.PROGRESSING, Trigger.WEIGH): State.PROGRESSING,
    (State.PAUSED, Trigger.WEIGH): State.PAUSED,
    (State.AWAITING_APPROVAL, Trigger.WEIGH): State.AWAITING_APPROVAL,
    (State.PROGRESSING, Trigger.PAUSE): State.PAUSED,
    (State.PAUSED, Trigger.RESUME): State.PROGRESSING,
    (State.PROGRESSING, Trigger.ASK): State.AWAITING_APPROVAL,
    (State.AWAITING_APPROVAL, Trigger.APPROVE): State.PROGRESSING,
    (State.PROGRESSING, Trigger.COMPLETE): State.COMPLETED,
    (State.PROGRESSING, Trigger.PASS): State.BAKING,
    (State.PAUSED, Trigger.PASS): State.BAKING,
    (State.PROGRESSING, Trigger.FORCE): State.BAKING,
    (State.PAUSED, Trigger.FORCE): State.BAKING,
    (State.AWAITING_APPROVAL, Trigger.FORCE): State.BAKING,
    (State.BAKING, Trigger.BAKED): State.PROMOTED,
    # Promotion is the one end that can be taken back: the incumbent is kept warm for that.
    (State.PROMOTED, Trigger.ROLL_BACK): State.ROLLED_BACK,
    **{(state, trigger): end for state in ACTIVE for trigger, end in EXITS.items()},
}


class IllegalTransition(DomainError):
    """What was asked for does not fit the state of the rollout."""

    code = "illegal_transition"
    status = HTTPStatus.CONFLICT


def next_state(state: State, trigger: Trigger) -> State:
    """Where ``trigger`` leads from ``state``.

    Raises:
        IllegalTransition: nowhere; the message names what would lead on.
    """
    after = TRANSITIONS.get((state, trigger))
    if after is None:
        possible = ", ".join(sorted(triggers_of(state))) or "nothing"
        raise IllegalTransition(
            f"A rollout that is {state} knows no {trigger}; what leads on is {possible}.",
            details={"state": str(state), "possible": sorted(triggers_of(state))},
        )
    return after


def triggers_of(state: State) -> frozenset[Trigger]:
    """Everything that leads on from ``state``."""
    return frozenset(trigger for before, trigger in TRANSITIONS if before is state)
