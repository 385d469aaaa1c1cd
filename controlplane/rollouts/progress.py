"""How far a rollout is: its steps with what each has brought and is expected to take, and why it waits or how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from controlplane.rollouts.machine import EXITS, FINAL, State
from controlplane.rollouts.models import Rollout, Step
from controlplane.rollouts.policy import SHADOW, Policy, parse_policy
from controlplane.rollouts.shapes import plan_from_json, segment_from_text, segment_to_text
from controlplane.rollouts.steps import EVIDENCE, MAX_BP, Kind, StepRule, Until, describe_step
from controlplane.rollouts.timeline import reason_of_last_move
from drift.segments import OVERALL, describe
from drift.verdict import Verdict

HOUR_S = 3600.0
PREPARE = "prepare"


class Phase(StrEnum):
    """Where a step is."""

    DONE = "done"
    CURRENT = "current"
    AHEAD = "ahead"
    ENDED = "ended"  # the rollout ended there
    SKIPPED = "skipped"  # it was never entered, and will not be


@dataclass(frozen=True, slots=True)
class Expected:
    """How long a step takes for an equal candidate on the traffic of the start; None where nobody can tell.

    ``never`` says which gate this traffic does not decide, and ``slowest`` which one takes longest. ``is_least``: it
    waits for something else as well, of which nobody knows how long it takes.
    """

    hours: float | None = None
    is_least: bool = False
    slowest: str = ""
    never: str = ""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One step of the policy, or with index -1 the time until the candidate is ready.

    ``reached`` is how many of ``floor`` observations the segment ``least`` has, which has fewest. ``num_passed`` of
    ``num_gates`` are passed of those that the step ends with. ``share`` is how much of all that is done, from 0 to 1.
    """

    index: int
    kind: str
    title: str
    phase: Phase
    share: float
    entered_at: datetime | None
    left_at: datetime | None
    deadline_at: datetime | None
    outcome: str
    reason: str
    floor: int
    reached: int
    least: str
    num_passed: int
    num_gates: int
    lasts_s: float | None
    expected: Expected


def steps_of(rollout: Rollout, now: datetime) -> list[StepProgress]:
    """Every step in its order, after the time until the candidate is ready."""
    policy = parse_policy(rollout.document)
    rows = {row.index: row for row in rollout.steps.all()}
    verdicts = _verdicts(rollout)
    prepare = _prepare(rollout, policy, rows.get(-1), now)
    return [
        prepare,
        *(
            _progress(rollout, policy, index, rows.get(index), verdicts, now)
            for index in range(len(policy.steps))
        ),
    ]


def tell_why(rollout: Rollout) -> str:
    """In one sentence why it stands where it does: what it waits for, or how it ended."""
    if rollout.state not in FINAL:
        return _sentence(rollout.why or _WAITS[State(rollout.state)])
    reason, actor = reason_of_last_move(rollout)
    return _sentence(reason or f"{_ENDS[State(rollout.state)]} by {actor}")


_WAITS = {
    State.PREPARING: "slots load and warm the candidate",
    State.PROGRESSING: "the step has just begun",
    State.PAUSED: "it is paused until somebody resumes it",
    State.AWAITING_APPROVAL: "an approver other than the author has to approve",
    State.BAKING: "the candidate is live, and is watched",
}
_ENDS = {
    State.PROMOTED: "nothing was found wrong while the candidate was watched",
    State.COMPLETED: "all steps are done",
    State.ROLLED_BACK: "it was rolled back",
    State.ABORTED: "it was aborted",
    State.EXPIRED: "a deadline passed without a verdict",
    State.FAILED: "the candidate could not serve",
    State.SUPERSEDED: "somebody moved the endpoint by hand",
}


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _prepare(rollout: Rollout, policy: Policy, row: Step | None, now: datetime) -> StepProgress:
    phase = _phase(rollout, -1, row)
    entered_at = row.entered_at if row else rollout.created_at
    return StepProgress(
        index=-1,
        kind=PREPARE,
        title="load and warm the candidate",
        phase=phase,
        share=_share_of(phase, [_elapsed(entered_at, now) / policy.prepare_s]),
        entered_at=entered_at,
        left_at=row.left_at if row else None,
        deadline_at=entered_at + timedelta(seconds=policy.prepare_s),
        outcome=row.outcome if row else "",
        reason=row.why if row else "",
        floor=0,
        reached=0,
        least="",
        num_passed=0,
        num_gates=0,
        lasts_s=None,
        expected=Expected(),
    )


def _progress(
    rollout: Rollout,
    policy: Policy,
    index: int,
    row: Step | None,
    verdicts: Mapping[str, list[str]],
    now: datetime,
) -> StepProgress:
    step = policy.steps[index]
    phase = _phase(rollout, index, row)
    reached, least = _reached(rollout, step, row)
    gates = _gates_that_end(step, policy, verdicts) if phase is Phase.CURRENT else []
    return StepProgress(
        index=index,
        kind=str(step.kind),
        title=describe_step(step),
        phase=phase,
        share=_share_of(phase, _parts(step, row, reached, gates, now)),
        entered_at=row.entered_at if row else None,
        left_at=row.left_at if row else None,
        deadline_at=row.entered_at + timedelta(seconds=step.deadline_s) if row else None,
        outcome=row.outcome if row else "",
        reason=row.why if row else "",
        floor=step.floor,
        reached=reached,
        least=least,
        num_passed=gates.count(Verdict.PASS),
        num_gates=len(gates),
        lasts_s=step.for_s,
        expected=_expect(rollout, policy, index),
    )


def _phase(rollout: Rollout, index: int, row: Step | None) -> Phase:
    if row is None:
        is_behind = index < rollout.step_index or rollout.state in FINAL
        return Phase.SKIPPED if is_behind else Phase.AHEAD
    if row.left_at is None:
        return Phase.CURRENT
    return Phase.ENDED if row.outcome in _ENDINGS else Phase.DONE


_ENDINGS = frozenset(EXITS)


def _reached(rollout: Rollout, step: StepRule, row: Step | None) -> tuple[int, str]:
    """The fewest observations that a segment has brought in this step, and whose they are."""
    if step.kind not in EVIDENCE or not step.floor:
        return 0, ""
    segments = (OVERALL,) if step.kind is Kind.CANARY else plan_from_json(rollout.plan).judged
    counts = row.counts if row else {}
    found = [(counts.get(segment_to_text(segment), 0), describe(segment)) for segment in segments]
    return min(found, key=lambda each: each[0])


def _gates_that_end(step: StepRule, policy: Policy, verdicts: Mapping[str, list[str]]) -> list[str]:
    """The verdicts that have to be a pass before the step ends."""
    if step.until is not Until.PASS or step.kind not in EVIDENCE:
        return []
    modes = {str(step.kind)} | ({SHADOW} if step.kind is Kind.CANARY and step.share else set())
    return [
        verdict
        for rule in policy.metrics
        if modes & set(rule.modes)
        for verdict in verdicts.get(rule.name, [])
    ]


def _verdicts(rollout: Rollout) -> dict[str, list[str]]:
    """Of each metric, the verdict on every segment at the last look."""
    last = rollout.looks.order_by("-number").first()
    found: dict[str, list[str]] = {}
    for result in last.results if last else ():
        found.setdefault(result["metric"], []).append(result["verdict"])
    return found


def _parts(
    step: StepRule, row: Step | None, reached: int, gates: list[str], now: datetime
) -> list[float]:
    """How much is done of each thing that the step waits for."""
    parts = [reached / step.floor] if step.floor else []
    if step.for_s and row is not None:
        parts.append(_elapsed(row.entered_at, now) / step.for_s)
    if gates:
        parts.append(gates.count(Verdict.PASS) / len(gates))
    return parts


def _share_of(phase: Phase, parts: Iterable[float]) -> float:
    if phase is Phase.DONE:
        return 1.0
    if phase in (Phase.AHEAD, Phase.SKIPPED):
        return 0.0
    return min(1.0, min(parts, default=0.0))


def _elapsed(since: datetime, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds())


def _expect(rollout: Rollout, policy: Policy, index: int) -> Expected:
    """The longest of what the step waits for: its time, its floor, and each gate that it ends with."""
    step = policy.steps[index]
    waits = [(step.for_s / HOUR_S, "")] if step.for_s else []
    floors = _hours_to_floor(policy, step)
    forecasts = [each for each in rollout.forecast if each["step"] == index]
    for each in forecasts:
        name = f"{each['metric']} on {describe(segment_from_text(each['segment']))}"
        if each["hours"] is None:
            return Expected(never=name)
        waits.append((each["hours"], name))
    waits += floors
    if not waits:
        return Expected()
    hours, slowest = max(waits)
    is_told = bool(floors or forecasts) or step.kind not in EVIDENCE
    return Expected(hours, is_least=not is_told, slowest=slowest)


def _hours_to_floor(policy: Policy, step: StepRule) -> list[tuple[float, str]]:
    """How long each declared segment takes to bring the floor of a step; a canary asks for it on all traffic alone."""
    is_canary = step.kind is Kind.CANARY
    share = step.canary_bp / MAX_BP if is_canary else step.share
    if step.kind not in EVIDENCE or not step.floor or not share:
        return []
    return [
        (
            step.floor / (one.per_hour * share),
            f"{step.floor} observations on {describe(one.segment)}",
        )
        for one in policy.traffic
        if one.segment == OVERALL or not is_canary
    ]
