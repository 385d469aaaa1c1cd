"""What an operator has before them: a rollout with its numbers in words, and the moves that can be made there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django import forms
from django.utils import timezone

from controlplane.access.roles import role_of
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.publication import connection
from controlplane.endpoints.slots import Report, read_report
from controlplane.rollouts import services
from controlplane.rollouts.copies import copies_of, worst_pairs_of
from controlplane.rollouts.decisions import HOLD_GATE
from controlplane.rollouts.forms import NeededReasonForm, ReasonForm, RollbackForm, WeightForm
from controlplane.rollouts.gate_rows import gates_of
from controlplane.rollouts.machine import FINAL, TRANSITIONS, State, Trigger
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.progress import steps_of, tell_why
from controlplane.rollouts.steps import largest_bp
from controlplane.rollouts.timeline import ANNOTATED, NO_REASONS, Entry, timeline_of
from controlplane.rollouts.words import arm_line, gate_line, state_chip, step_line, verdict_chip
from inference.queue import QueueUnavailable

logger = logging.getLogger(__name__)

PLAIN, DANGER, PRIMARY = "default", "danger", ""
NUM_ENTRIES = 20


@dataclass(frozen=True, slots=True)
class Desk:
    """A rollout, who looks at it, and how its versions fare; no report while Redis is away."""

    rollout: Rollout
    user: Any
    report: Report | None

    @property
    def role(self) -> str:
        """The role of whoever looks."""
        return role_of(self.user)

    @property
    def actor(self) -> str:
        """Whoever looks, as events name them."""
        name: str = self.user.get_username()
        return name

    @property
    def is_author(self) -> bool:
        """Whether whoever looks has started it."""
        return self.actor == self.rollout.created_by

    @property
    def may_approve(self) -> bool:
        """Whether whoever looks may approve it, or force it."""
        return self.role == services.APPROVER and not self.is_author

    @property
    def may_pass(self) -> bool:
        """Whether the gates alone allow a promotion."""
        return services.may_pass(self.rollout)

    @property
    def needs_force(self) -> bool:
        """Whether a rollback would leave a version that answers for one that cannot."""
        rollout = self.rollout
        if self.report is None or rollout.state not in (State.BAKING, State.PROMOTED):
            return False
        ready = self.report.ready_versions(rollout.endpoint.name)
        return rollout.candidate.name in ready and rollout.incumbent.name not in ready

    @property
    def moves(self) -> list[Move]:
        """What whoever looks may do now."""
        return [move for move in MOVES if move.is_open(self)]

    def leads(self, *triggers: Trigger) -> bool:
        """Whether one of ``triggers`` leads on from where the rollout stands."""
        return any((State(self.rollout.state), trigger) in TRANSITIONS for trigger in triggers)


@dataclass(frozen=True, slots=True)
class Move:
    """One button: when it is there, its form, what it does, and what its page says.

    One that is ``at_once`` acts when it is pressed on the page of the rollout; a reason may be added afterwards.
    """

    name: str
    button: str
    icon: str
    is_open: Callable[[Desk], bool]
    act: Callable[[Desk, dict[str, Any]], Rollout]
    form: Callable[[Desk, Any], forms.Form] = lambda _, data: ReasonForm(data)
    variant: str = PLAIN
    at_once: bool = False
    explanation: str = ""


def look_at_slots() -> Report | None:
    """What the slots report; None while Redis is away."""
    try:
        return read_report(queue=connection())
    except QueueUnavailable:
        logger.warning("slots unknown: redis is away")
        return None


def active_rollout_of(endpoint: Endpoint) -> Rollout | None:
    """The rollout that decides about the endpoint's candidate, if one does."""
    return Rollout.objects.with_names().active().of_endpoint(endpoint.name).first()


def overview_of(desk: Desk, now: datetime) -> dict[str, Any]:
    """Everything that the page of a rollout shows, in words."""
    rollout = desk.rollout
    copies = copies_of(rollout, connection())
    return {
        "state": state_chip(rollout.state),
        "verdict": verdict_chip(rollout.verdict),
        "why": tell_why(rollout),
        "steps": [step_line(step, now) for step in steps_of(rollout, now)],
        "gates": [gate_line(row) for row in gates_of(rollout)],
        "worst": worst_pairs_of(rollout),
        "copies": copies,
        "arms": [arm_line(arm) for arm in copies.arms],
        "events": _events_of(rollout),
        "percent": f"{rollout.canary_bp / 100:g}",
    }


def _events_of(rollout: Rollout) -> list[dict[str, Any]]:
    """What happened, the newest first, with the reasons that were given afterwards."""
    entries = timeline_of(rollout)[: NUM_ENTRIES * 2]
    notes = {each.data["event"]: each for each in reversed(entries) if each.type == ANNOTATED}
    shown = [each for each in entries if each.type != ANNOTATED][:NUM_ENTRIES]
    return [
        {
            "entry": each,
            "what": each.type.removeprefix("rollout.").replace("_", " "),
            "note": notes.get(each.sequence),
            "reason": "" if _failed_of(each) else each.reason,
            "failed": _failed_of(each),
            "lacks_reason": each.kind == "event" and each.reason in NO_REASONS,
        }
        for each in shown
    ]


def _failed_of(entry: Entry) -> list[str]:
    """What a look found to be worse, each in a sentence."""
    return [each["sentence"] for each in entry.data["failed"]] if entry.kind == "look" else []


def tell(rollout: Rollout) -> str:
    """What became of a move, in one line."""
    state = rollout.state.replace("_", " ")
    return f"Rollout {rollout.key} is {state}. {rollout.candidate.name} has {rollout.canary_bp / 100:g} % of the traffic."


def _common(desk: Desk, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": desk.rollout.key,
        "actor": desk.actor,
        "reason": data.get("reason", ""),
        "now": timezone.now(),
        "queue": connection(),
    }


def _can_retry(desk: Desk) -> bool:
    return desk.rollout.state in FINAL and desk.rollout.state != State.PROMOTED


def _can_roll_back(desk: Desk) -> bool:
    """After a promotion, only as long as the candidate is what answers."""
    if desk.rollout.state == State.PROMOTED:
        return desk.rollout.endpoint.live_id == desk.rollout.candidate_id
    return desk.leads(Trigger.ROLL_BACK)


def _can_promote(desk: Desk) -> bool:
    return desk.leads(Trigger.PASS, Trigger.FORCE) and (desk.may_pass or desk.may_approve)


def _can_weigh(desk: Desk) -> bool:
    steps = parse_policy(desk.rollout.document).steps
    return desk.leads(Trigger.WEIGH) and largest_bp(steps, desk.rollout.step_index) > 0


def _resume_form(desk: Desk, data: Any) -> forms.Form:
    is_held = desk.rollout.hold == HOLD_GATE
    return NeededReasonForm(data) if is_held else ReasonForm(data)


def _promote_form(desk: Desk, data: Any) -> forms.Form:
    return ReasonForm(data) if desk.may_pass else NeededReasonForm(data)


MOVES = (
    Move(
        "rollback",
        "Roll back",
        "undo",
        _can_roll_back,
        lambda desk, data: services.rollback(force=data["force"], **_common(desk, data)),
        form=lambda desk, data: RollbackForm(data, initial={"force": desk.needs_force}),
        variant=DANGER,
        at_once=True,
        explanation="The incumbent answers all requests at once, and the candidate is rejected on this endpoint.",
    ),
    Move(
        "abort",
        "Abort",
        "stop",
        lambda desk: desk.leads(Trigger.ABORT),
        lambda desk, data: services.abort(**_common(desk, data)),
        at_once=True,
        explanation="The rollout ends and the incumbent answers. The candidate is not rejected.",
    ),
    Move(
        "pause",
        "Pause",
        "pause",
        lambda desk: desk.leads(Trigger.PAUSE),
        lambda desk, data: services.pause(**_common(desk, data)),
        at_once=True,
        explanation="The candidate keeps its traffic, and gates and deadlines go on.",
    ),
    Move(
        "resume",
        "Resume",
        "play_arrow",
        lambda desk: desk.leads(Trigger.RESUME),
        lambda desk, data: services.resume(**_common(desk, data)),
        form=_resume_form,
        variant=PRIMARY,
        explanation="The rollout goes on. A failed gate is overruled until the step ends, and still forbids a pass.",
    ),
    Move(
        "approve",
        "Approve",
        "verified",
        lambda desk: desk.leads(Trigger.APPROVE) and desk.may_approve,
        lambda desk, data: services.approve(role=desk.role, **_common(desk, data)),
        variant=PRIMARY,
        explanation="The rollout goes on to its next step.",
    ),
    Move(
        "weight",
        "Set share",
        "percent",
        _can_weigh,
        lambda desk, data: services.set_weight(canary_bp=data["canary_bp"], **_common(desk, data)),
        form=lambda desk, data: WeightForm(data, rollout=desk.rollout),
        explanation="The same users always meet the same version.",
    ),
    Move(
        "promote",
        "Promote",
        "upgrade",
        _can_promote,
        lambda desk, data: services.promote(role=desk.role, **_common(desk, data)),
        form=_promote_form,
        explanation="The candidate is live at once; the incumbent stays warm, so that one click leads back.",
    ),
    Move(
        "retry",
        "Try again",
        "replay",
        _can_retry,
        lambda desk, data: services.retry(**_common(desk, data)),
        variant=PRIMARY,
        explanation="A new rollout of the same version under the newest version of its policy. Nothing that was counted "
        "is taken over. A version that was rolled back needs a reason.",
    ),
)
