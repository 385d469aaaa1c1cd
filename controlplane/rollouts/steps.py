"""The steps a candidate goes through: parsed from JSON, checked as a whole, and what traffic each of them gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controlplane.rollouts.documents import (
    InvalidPolicy,
    read_count,
    read_number,
    read_object,
    refuse_unknown,
)

DAY_S = 86_400.0
MAX_S = 30 * DAY_S
MAX_BP = 10_000


class Kind(StrEnum):
    """What a step does."""

    SCORE = "score"  # the candidate scores answers of the incumbent, in one pass
    SHADOW = "shadow"  # it answers copies that nobody sees
    CANARY = "canary"  # it answers
    PAUSE = "pause"
    APPROVAL = "approval"
    BAKE = "bake"  # it is live, and watched


class Until(StrEnum):
    """When a step that gathers evidence is done."""

    PASS = "pass"  # noqa: S105 (a verdict): every gate that its traffic can be judged by was passed
    FLOOR = "floor"  # there is as much evidence as asked for, and none of it says fail


EVIDENCE = (Kind.SCORE, Kind.SHADOW, Kind.CANARY)


@dataclass(frozen=True, slots=True)
class StepRule:
    """One step.

    ``share`` of requests is copied (canary: beside those it answers), ``self_share`` answered twice by the incumbent,
    and ``canary_bp`` of 10,000 buckets are answered by the candidate. A step brings ``floor`` pairs at least, on
    all traffic and on every frozen segment (canary: requests, on all traffic), and lasts ``for_s`` at least; a pause
    without it waits for somebody. After ``deadline_s`` the rollout ends on the incumbent's side. A bake fails when it is
    shown that more than ``max_failure_rate`` of requests get no answer.
    """

    kind: Kind
    share: float = 0.0
    self_share: float = 0.0
    canary_bp: int = 0
    floor: int = 0
    until: Until = Until.PASS
    for_s: float | None = None
    deadline_s: float = 7 * DAY_S
    max_failure_rate: float = 0.05


FIELDS: dict[Kind, set[str]] = {
    Kind.SCORE: {"share", "floor", "until", "for_s"},
    Kind.SHADOW: {"share", "self_share", "floor", "until", "for_s"},
    Kind.CANARY: {"bp", "share", "floor", "until", "for_s"},
    Kind.PAUSE: {"for_s"},
    Kind.APPROVAL: set(),
    Kind.BAKE: {"for_s", "max_failure_rate"},
}
DEFAULTS: dict[Kind, dict[str, Any]] = {
    Kind.SCORE: {"share": 0.2, "floor": 50, "until": "pass"},
    Kind.SHADOW: {"share": 0.2, "self_share": 0.01, "floor": 100, "until": "pass"},
    Kind.CANARY: {"floor": 100, "until": "pass", "for_s": 600},
    Kind.PAUSE: {},
    Kind.APPROVAL: {},
    Kind.BAKE: {"for_s": 3600},
}


def parse_steps(documents: Sequence[Any]) -> tuple[StepRule, ...]:
    """The steps in their order.

    Raises:
        InvalidPolicy: one of them is malformed, or they do not follow one another.
    """
    steps = tuple(
        _parse_step(document, f"steps[{index}]") for index, document in enumerate(documents)
    )
    _check_order(steps)
    return steps


def evidence_step(steps: Sequence[StepRule], index: int) -> StepRule | None:
    """The last step up to ``index`` that gives the candidate traffic, which goes on while later ones wait."""
    known = [step for step in steps[: index + 1] if step.kind in EVIDENCE]
    return known[-1] if known else None


def largest_bp(steps: Sequence[StepRule], index: int) -> int:
    """The largest share that the steps up to ``index`` have decided on."""
    return max((step.canary_bp for step in steps[: index + 1]), default=0)


def describe_step(step: StepRule) -> str:
    """A few words for people."""
    if step.kind is Kind.CANARY:
        return f"canary at {step.canary_bp / 100:g} %"
    if step.kind in EVIDENCE:
        return f"{step.kind} of {step.share:.0%}"
    return f"{step.kind}" if step.for_s is None else f"{step.kind} for {step.for_s:g} s"


def _parse_step(document: Any, where: str) -> StepRule:
    given = read_object(document, where)
    try:
        kind = Kind(given.get("type", ""))
    except ValueError:
        kinds = ", ".join(Kind)
        raise InvalidPolicy(f"{where}.type={given.get('type')!r} must be one of {kinds}.") from None
    refuse_unknown(given, where, {"type", "deadline_s"} | FIELDS[kind])
    values = DEFAULTS[kind] | dict(given)
    return StepRule(
        kind=kind,
        share=_share(values, "share", where, may_be_none=kind is Kind.CANARY),
        self_share=_share(values, "self_share", where, may_be_none=True),
        canary_bp=_basis_points(values, where) if kind is Kind.CANARY else 0,
        floor=read_count(values, "floor", 1, where) if "floor" in values else 0,
        until=_until(values, where),
        for_s=_seconds(values, "for_s", where),
        deadline_s=read_number(values, "deadline_s", 7 * DAY_S, low=0, high=MAX_S + 1, where=where),
        max_failure_rate=read_number(values, "max_failure_rate", 0.05, low=0, high=1, where=where),
    )


def _share(values: Mapping[str, Any], key: str, where: str, *, may_be_none: bool) -> float:
    if not values.get(key) and may_be_none:
        return 0.0
    if key not in values:
        return 0.0
    return read_number(values, key, 0.0, low=0, high=1.000001, where=where)


def _basis_points(values: Mapping[str, Any], where: str) -> int:
    if "bp" not in values:
        raise InvalidPolicy(
            f"{where}.bp is missing: say how many of {MAX_BP:,} requests it answers."
        )
    canary_bp = read_count(values, "bp", 1, where)
    if canary_bp > MAX_BP:
        raise InvalidPolicy(
            f"{where}.bp={canary_bp} must be at most {MAX_BP}, which is all traffic."
        )
    return canary_bp


def _until(values: Mapping[str, Any], where: str) -> Until:
    try:
        return Until(values.get("until", "pass"))
    except ValueError:
        known = ", ".join(Until)
        raise InvalidPolicy(f"{where}.until={values['until']!r} must be one of {known}.") from None


def _seconds(values: Mapping[str, Any], key: str, where: str) -> float | None:
    if values.get(key) is None:
        return None
    return read_number(values, key, 0.0, low=-1e-9, high=MAX_S + 1, where=where)


def _check_order(steps: Sequence[StepRule]) -> None:
    shares = [step.canary_bp for step in steps if step.kind is Kind.CANARY]
    if shares != sorted(set(shares)):
        raise InvalidPolicy(f"steps: canary shares {shares} must rise from step to step.")
    bakes = [index for index, step in enumerate(steps) if step.kind is Kind.BAKE]
    if bakes and bakes != [len(steps) - 1]:
        raise InvalidPolicy("steps: bake comes once, and last: it watches what was promoted.")
    if steps and not any(step.kind in EVIDENCE for step in steps):
        raise InvalidPolicy("steps: none of them gathers evidence; add a shadow or a canary step.")
    late = [step for step in steps if (step.for_s or 0.0) >= step.deadline_s]
    if late:
        raise InvalidPolicy(
            f"steps: {describe_step(late[0])} lasts {late[0].for_s:g} s, longer than its deadline of "
            f"{late[0].deadline_s:g} s; raise deadline_s."
        )
