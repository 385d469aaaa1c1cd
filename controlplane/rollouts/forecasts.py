"""How long a policy will take on the traffic of an endpoint: told before a rollout starts, not found out at its deadline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from controlplane.rollouts.policy import CANARY, Kind, MetricRule, Policy, SegmentTraffic
from controlplane.rollouts.steps import EVIDENCE, MAX_BP, StepRule, Until, describe_step
from controlplane.rollouts.steps import Kind as StepKind
from drift.eprocess import Floats, Side
from drift.matching import NUM_CONTROLS
from drift.power import (
    Claim,
    Forecast,
    forecast_differences,
    forecast_rate,
    shares_of_matches,
    shares_of_pairs,
)
from drift.segments import OVERALL, Segment, describe


@dataclass(frozen=True, slots=True)
class Step:
    """The share of requests that are copied to the candidate, or answered by it, while a step lasts."""

    mode: str
    share: float


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The candidates that a forecast imagines: an equal one, and one that is worse by so much."""

    harm: float = 0.10
    exceedance_if_good: float = 0.003
    exceedance_if_bad: float = 0.03


@dataclass(frozen=True, slots=True)
class Expectation:
    """Observations and hours until an equal candidate passes one gate, and until a bad one fails it."""

    metric: str
    segment: Segment
    to_pass: Forecast
    to_fail: Forecast


def forecast(
    policy: Policy,
    traffic: Sequence[SegmentTraffic],
    step: Step,
    assumptions: Assumptions | None = None,
) -> list[Expectation]:
    """Every gate that ``step`` has data for, on every segment of ``traffic``."""
    assumed = assumptions or Assumptions()
    rules = [rule for rule in policy.metrics if step.mode in rule.modes]
    return [
        _expect(policy, rule, segment, step, assumed, len(rules) * len(_judged(rule, traffic)))
        for rule in rules
        for segment in _judged(rule, traffic)
    ]


def find_unreachable(
    expectations: Iterable[Expectation], deadline_hours: float
) -> list[tuple[Expectation, str]]:
    """The gates at which an equal candidate is not expected to pass in time, each with a sentence for the engineer."""
    late = []
    for expected in expectations:
        hours = expected.to_pass.hours
        if hours is not None and hours <= deadline_hours:
            continue
        needed = (
            "will never be decided"
            if expected.to_pass.num is None
            else f"needs {expected.to_pass.num:,}"
        )
        takes = "" if hours is None else f", {hours:,.1f} hours of this traffic"
        told = (
            f"{expected.metric} on {describe(expected.segment)} {needed} observations{takes}; the deadline is "
            f"{deadline_hours:g} hours. Raise the share or the margin, or merge the segment."
        )
        late.append((expected, told))
    return late


def _judged(rule: MetricRule, traffic: Sequence[SegmentTraffic]) -> list[SegmentTraffic]:
    """A tail is judged on all traffic; whether a segment will be large enough is not known beforehand."""
    if rule.kind is not Kind.LATENCY:
        return [one for one in traffic if rule.judges(one.segment)]
    return [one for one in traffic if one.segment == OVERALL]


def _expect(
    policy: Policy,
    rule: MetricRule,
    traffic: SegmentTraffic,
    step: Step,
    assumed: Assumptions,
    num_streams: int,
) -> Expectation:
    budget = policy.alpha / num_streams / (2 if policy.discovery else 1)
    margin = rule.overall_margin if traffic.segment == OVERALL else rule.margin
    passes = Claim(margin, Side.BELOW, -math.log(policy.alpha))
    fails = Claim(rule.tolerance, Side.ABOVE, -math.log(budget))
    per_hour = traffic.per_hour * step.share
    if rule.kind is Kind.LATENCY:
        return Expectation(
            rule.name,
            traffic.segment,
            forecast_rate(assumed.exceedance_if_good, passes, per_hour),
            forecast_rate(assumed.exceedance_if_bad, fails, per_hour),
        )
    to_pass, to_fail = (
        forecast_differences(_shares(step, traffic.loss_rate, harm), claim, per_hour)
        for harm, claim in ((0.0, passes), (assumed.harm, fails))
    )
    return Expectation(rule.name, traffic.segment, to_pass, to_fail)


def _shares(step: Step, loss: float, harm: float) -> Floats:
    """Differences of arms that fail independently of one another, which is the slowest case."""
    if step.mode != CANARY:
        worse = (loss + harm) * (1 - loss)
        better = loss * (1 - loss - harm)
        return shares_of_pairs(worse + better, harm)
    available = (1 - step.share) / step.share
    num_controls = int(NUM_CONTROLS[min(5, max(1, math.floor(available)))])
    return shares_of_matches(loss, harm, num_controls)


def forecast_steps(
    policy: Policy, traffic: Sequence[SegmentTraffic]
) -> list[tuple[int, StepRule, list[Expectation]]]:
    """What each step that ends with a pass is expected to take, by its number.

    A gate that an earlier step ends with is not asked for again: what has been shown once stays shown.
    """
    shown: set[str] = set()
    expected = []
    for index, step in enumerate(policy.steps):
        if step.kind not in EVIDENCE or step.until is not Until.PASS:
            continue
        rules = tuple(
            rule for rule in policy.metrics if step.kind in rule.modes and rule.name not in shown
        )
        share = step.canary_bp / MAX_BP if step.kind is StepKind.CANARY else step.share
        judged = replace(policy, metrics=rules)
        expected.append((index, step, forecast(judged, traffic, Step(str(step.kind), share))))
        shown |= {rule.name for rule in rules}
    return expected


def find_late_steps(policy: Policy, traffic: Sequence[SegmentTraffic]) -> list[str]:
    """A sentence for each gate that an equal candidate is not expected to pass before its step's deadline."""
    return [
        f"steps[{index}] ({describe_step(step)}): {told}"
        for index, step, expectations in forecast_steps(policy, traffic)
        for _, told in find_unreachable(expectations, step.deadline_s / 3600)
    ]
