"""A rollout's states, numbers and times in words, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from controlplane.rollouts.copies import Arm
from controlplane.rollouts.gate_rows import GateRow
from controlplane.rollouts.machine import State
from controlplane.rollouts.policy import Kind
from controlplane.rollouts.progress import Phase, StepProgress
from drift.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Chip:
    """A word with a symbol, so that nobody needs its colour (``variant``) to read it."""

    text: str
    variant: str


_STATES = {
    State.PREPARING: Chip("… preparing", "info"),
    State.PROGRESSING: Chip("▸ progressing", "info"),
    State.PAUSED: Chip("‖ paused", "warning"),
    State.AWAITING_APPROVAL: Chip("‖ awaiting approval", "warning"),
    State.BAKING: Chip("▸ live, watched", "info"),
    State.PROMOTED: Chip("✓ promoted", "success"),
    State.COMPLETED: Chip("✓ completed", "success"),
    State.ROLLED_BACK: Chip("↩ rolled back", "danger"),
    State.ABORTED: Chip("■ aborted", "warning"),
    State.EXPIRED: Chip("■ expired", "warning"),
    State.FAILED: Chip("✗ failed", "danger"),
    State.SUPERSEDED: Chip("■ superseded", "warning"),
}
_VERDICTS = {
    Verdict.PASS: Chip("✓ pass", "success"),
    Verdict.FAIL: Chip("✗ fail", "danger"),
    Verdict.INCONCLUSIVE: Chip("? undecided", "info"),
    Verdict.ERROR: Chip("! not measured", "warning"),
}
_PHASES = {
    Phase.DONE: Chip("✓ done", "success"),
    Phase.CURRENT: Chip("▸ now", "info"),
    Phase.AHEAD: Chip("○ ahead", ""),
    Phase.ENDED: Chip("✗ ended here", "danger"),
    Phase.SKIPPED: Chip("- not run", ""),
}
_ARMS = {
    "shadow": "answered by the candidate",
    "score": "scored by the candidate",
    "self": "answered again by the incumbent",
}
_REASONS = {
    "not_ready": "the version was not ready",
    "full": "its lane of copies was full",
    "busy": "the live version was busy",
    "late": "not started in time",
    "lost": "lost",
    "route_changed": "the route had changed",
    "no_incumbent": "the request itself had no end",
    "nothing_to_score": "there was no answer to score",
    "cancelled": "the caller left",
    "preempted": "made way for requests",
    "shutdown": "its slot was stopped",
    "gone": "its body was gone",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class GateLine:
    """A row of the table of gates as it is shown."""

    row: GateRow
    verdict: Chip
    n: str
    needed: str
    estimate: str
    interval: str
    margin: str
    tolerance: str
    means: str
    e_harm: str
    e_safe: str


@dataclass(frozen=True, slots=True)
class StepLine:
    """A row of the table of steps as it is shown."""

    step: StepProgress
    phase: Chip
    number: str
    percent: int
    done: str
    expected: str
    lasted: str


@dataclass(frozen=True, slots=True)
class ArmLine:
    """A row of the table of copies as it is shown; ``skips`` is None while nobody knows."""

    arm: Arm
    title: str
    coverage: str
    unobserved: str
    skips: str | None


def state_chip(state: str) -> Chip:
    """The state of a rollout."""
    return _STATES[State(state)]


def verdict_chip(verdict: str) -> Chip:
    """What the gates say."""
    return _VERDICTS[Verdict(verdict)]


def reason_in_words(code: str) -> str:
    """Why a copy tells nothing; a code that has no words yet is shown as it is."""
    return _REASONS.get(code, code.replace("_", " "))


def gate_line(row: GateRow) -> GateLine:
    """Numbers in the unit of the metric."""
    return GateLine(
        row=row,
        verdict=verdict_chip(row.verdict),
        n=f"{row.n:,}",
        needed=f"{row.needed:,} more" if row.needed else "",
        estimate=_amount(row.kind, row.estimate),
        interval=_interval(row),
        margin=_amount(row.kind, row.margin),
        tolerance=_amount(row.kind, row.tolerance),
        means=_means(row),
        e_harm=_e_value(row.e_harm),
        e_safe=_e_value(row.e_safe),
    )


def step_line(step: StepProgress, now: datetime) -> StepLine:
    """What a step has brought, and how long it takes."""
    return StepLine(
        step=step,
        phase=_PHASES[step.phase],
        number="" if step.index < 0 else str(step.index + 1),
        percent=round(100 * step.share),
        done=_done(step),
        expected=_expected(step),
        lasted=_lasted(step, now),
    )


def arm_line(arm: Arm) -> ArmLine:
    """One kind of copy."""
    return ArmLine(
        arm=arm,
        title=_ARMS.get(arm.name, arm.name),
        coverage="-" if arm.coverage is None else f"{arm.coverage:.0%}",
        unobserved=_reasons(arm.unobserved),
        skips=None if arm.skips is None else _reasons(arm.skips),
    )


def duration(seconds: float) -> str:
    """A length of time with one unit, or two where that tells more."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86_400:.3g} days"


def _reasons(counts: Mapping[str, int]) -> str:
    """Numbers by reason, the largest first."""
    largest = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{n:,} {reason_in_words(code)}" for code, n in largest)


def _amount(kind: str, value: float | None) -> str:
    """Rates in per cent, differences in points."""
    if value is None:
        return ""
    return f"{100 * value:.2f} %" if kind == Kind.LATENCY else f"{100 * value:+.1f}"


def _interval(row: GateRow) -> str:
    if row.lower is None or row.upper is None:
        return ""
    return f"{_amount(row.kind, row.lower)} to {_amount(row.kind, row.upper)}"


def _means(row: GateRow) -> str:
    """What each arm had by itself: losses in per cent, milliseconds, seconds per 1,000 tokens."""
    if row.incumbent is None or row.candidate is None:
        return ""
    if row.kind == Kind.LATENCY:
        return f"{row.incumbent:,.0f} ms → {row.candidate:,.0f} ms"
    if row.kind == Kind.COST:
        return f"{row.incumbent:.3g} → {row.candidate:.3g} s/1k"
    return f"{row.incumbent:.1%} → {row.candidate:.1%}"


def _e_value(value: float | None) -> str:
    if value is None:
        return ""
    if value < 1000:
        return f"{value:,.2f}"
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def _done(step: StepProgress) -> str:
    if step.phase in (Phase.AHEAD, Phase.SKIPPED):
        return ""
    parts = []
    if step.floor:
        parts.append(f"{step.reached:,} of {step.floor:,} on {step.least}")
    if step.num_gates:
        parts.append(f"{step.num_passed} of {step.num_gates} gates passed")
    return ", ".join(parts)


def _expected(step: StepProgress) -> str:
    expected = step.expected
    if expected.never:
        return f"this traffic never decides {expected.never}"
    if expected.hours is None:
        return (
            "nobody can tell" if step.floor else "as long as people take" if step.index >= 0 else ""
        )
    slowest = f" for {expected.slowest}" if expected.slowest else ""
    about = "at least" if expected.is_least else "about"
    return f"{about} {duration(expected.hours * 3600)}{slowest}"


def _lasted(step: StepProgress, now: datetime) -> str:
    if step.entered_at is None:
        return ""
    if step.left_at is not None:
        return duration((step.left_at - step.entered_at).total_seconds())
    since = duration((now - step.entered_at).total_seconds())
    if step.deadline_at is None or step.deadline_at <= now:
        return f"{since} so far"
    return f"{since} so far, deadline in {duration((step.deadline_at - now).total_seconds())}"
