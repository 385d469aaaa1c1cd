"""What a rollout does next, from where it stands and what is known: values in, a move or a reason to wait out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.endpoints.candidacy import Traffic
from controlplane.rollouts.gates import Decision
from controlplane.rollouts.machine import State, Trigger
from controlplane.rollouts.policy import Policy
from controlplane.rollouts.steps import (
    EVIDENCE,
    MAX_BP,
    Kind,
    StepRule,
    Until,
    describe_step,
    evidence_step,
)

HOLD_STEP, HOLD_GATE, HOLD_MANUAL = "step", "gate", "manual"


@dataclass(frozen=True, slots=True)
class View:
    """A rollout as it stands."""

    state: State
    step_index: int
    step_at: datetime
    deadline_at: datetime
    is_released: bool
    hold: str
    policy: Policy

    @property
    def step(self) -> StepRule | None:
        """The step it is at, if it is at one."""
        steps = self.policy.steps
        return steps[self.step_index] if 0 <= self.step_index < len(steps) else None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at one moment.

    ``is_held``: the endpoint still belongs to the rollout. ``is_ready``: a slot could answer with the candidate.
    ``broken`` says why the candidate cannot serve, empty where it can or nobody knows. ``failing`` are gates that are
    not critical, have failed, and were not overridden. ``short_of`` says which floor is not reached, ``undecided`` which
    gate of the step is not passed. ``baking`` says what the watch over the live candidate has shown to be wrong.
    """

    now: datetime
    is_held: bool
    is_ready: bool
    broken: str = ""
    decision: Decision = Decision.INCONCLUSIVE
    reason: str = ""
    failing: tuple[str, ...] = ()
    short_of: str = ""
    undecided: str = ""
    baking: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A trigger, why, and what comes with it."""

    trigger: Trigger
    reason: str
    step_index: int | None = None
    traffic: Traffic | None = None
    hold: str = ""
    is_released: bool = False
    overrides: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do, and why."""

    reason: str


def decide(view: View, facts: Facts) -> Move | Wait:
    """The one thing to do next.

    What leads to the incumbent comes first, and does not ask whether somebody paused the rollout.
    """
    if view.state is State.PROMOTED or view.state not in _CHOICES:
        return Wait("it has ended")
    return _must_end(view, facts) or _CHOICES[view.state](view, facts)


def traffic_at(policy: Policy, step_index: int) -> Traffic:
    """What the candidate is given at a step; a step that only waits goes on with what the one before it gave."""
    step = evidence_step(policy.steps, step_index)
    if step is None:
        return Traffic()
    copies = round(step.share * MAX_BP)
    if step.kind is Kind.SCORE:
        return Traffic(score_bp=copies)
    return Traffic(
        canary_bp=step.canary_bp, shadow_bp=copies, self_bp=round(step.self_share * MAX_BP)
    )


def _must_end(view: View, facts: Facts) -> Move | None:
    if not facts.is_held:
        return Move(Trigger.SUPERSEDE, "somebody moved the endpoint by hand")
    if facts.broken:
        return Move(Trigger.FAIL, facts.broken)
    if facts.decision is Decision.ROLLBACK:
        return Move(Trigger.HARM, facts.reason)
    if view.state is State.BAKING:
        return Move(Trigger.HARM, facts.baking) if facts.baking else None
    if facts.now >= view.deadline_at:
        return Move(Trigger.EXPIRE, "the time of the whole rollout is over without a promotion")
    step = view.step
    if step is not None and facts.now >= view.step_at + timedelta(seconds=step.deadline_s):
        waited = facts.undecided or facts.short_of or describe_step(step)
        return Move(Trigger.EXPIRE, f"the deadline of step {view.step_index + 1} passed: {waited}")
    return None


def _prepare(view: View, facts: Facts) -> Move | Wait:
    if facts.is_ready:
        return Move(
            Trigger.READY,
            "the candidate is loaded and warm",
            step_index=0,
            traffic=traffic_at(view.policy, 0),
        )
    if _elapsed(view, facts) >= view.policy.prepare_s:
        told = f"the candidate was not ready within {view.policy.prepare_s:g} s: {facts.missing}"
        return Move(Trigger.FAIL, told)
    return Wait(facts.missing or "the candidate is being loaded")


def _progress(view: View, facts: Facts) -> Move | Wait:
    step = view.step
    if facts.failing:
        told = f"a gate that is not critical has failed: {', '.join(facts.failing)}"
        return Move(Trigger.PAUSE, told, hold=HOLD_GATE)
    if step is not None and step.kind in EVIDENCE and (waiting := _why_not_done(view, step, facts)):
        return Wait(waiting)
    if step is not None and not view.is_released:
        if step.kind is Kind.PAUSE:
            return Move(Trigger.PAUSE, describe_step(step), hold=HOLD_STEP)
        if step.kind is Kind.APPROVAL:
            return Move(Trigger.ASK, "somebody other than the author has to approve")
    return _go_on(view, facts)


def _why_not_done(view: View, step: StepRule, facts: Facts) -> str:
    if (step.for_s or 0.0) > _elapsed(view, facts):
        return f"the step lasts {step.for_s:g} s at least"
    if facts.short_of:
        return facts.short_of
    return facts.undecided if step.until is Until.PASS else ""


def _go_on(view: View, facts: Facts) -> Move | Wait:
    after = view.step_index + 1
    steps = view.policy.steps
    if after < len(steps) and steps[after].kind is not Kind.BAKE:
        return Move(
            Trigger.ADVANCE,
            f"step {view.step_index + 1} is done",
            step_index=after,
            traffic=traffic_at(view.policy, after),
        )
    if not view.policy.promotes:
        return Move(Trigger.COMPLETE, facts.reason or "all steps are done")
    if facts.decision is not Decision.PROMOTE:
        return Wait(f"no promotion without a pass: {facts.reason or 'nothing was measured'}")
    if not facts.is_ready:
        return Wait(f"the candidate cannot go live: {facts.missing}")
    return Move(Trigger.PASS, facts.reason, step_index=after)


def _stay_paused(view: View, facts: Facts) -> Move | Wait:
    step = view.step
    is_over = step is not None and step.for_s is not None and _elapsed(view, facts) >= step.for_s
    if view.hold == HOLD_STEP and is_over:
        return Move(Trigger.RESUME, "the pause is over", is_released=True)
    return Wait("it is paused until somebody resumes it" if not is_over else "it is paused")


def _await(view: View, facts: Facts) -> Move | Wait:  # noqa: ARG001 (one signature for all states)
    return Wait("it waits for an approval")


def _bake(view: View, facts: Facts) -> Move | Wait:
    step = view.step
    for_s = step.for_s if step is not None and step.kind is Kind.BAKE else 0.0
    if _elapsed(view, facts) >= (for_s or 0.0):
        return Move(Trigger.BAKED, "nothing was found wrong while it was watched")
    return Wait(f"it is watched for {for_s:g} s")


def _elapsed(view: View, facts: Facts) -> float:
    return (facts.now - view.step_at).total_seconds()


_CHOICES = {
    State.PREPARING: _prepare,
    State.PROGRESSING: _progress,
    State.PAUSED: _stay_paused,
    State.AWAITING_APPROVAL: _await,
    State.BAKING: _bake,
}
