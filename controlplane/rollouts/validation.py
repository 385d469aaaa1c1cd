"""Whether a policy can guide a rollout: each gate is measured, each step ends, and traffic suffices for the deadlines."""

from __future__ import annotations

from controlplane.rollouts.documents import InvalidPolicy
from controlplane.rollouts.forecasts import find_late_steps
from controlplane.rollouts.policy import CANARY, SCORE, SHADOW, Kind, MetricRule, Policy
from controlplane.rollouts.steps import Until
from drift.classifiers import CATEGORIES

# The fields of a live row that a gate may name, and the traffic they are measured on.
DISAGREEMENT, JUDGED_WORSE, COST = "disagreement", "judged_worse", "engine_s_per_1k"
SCORES = {DISAGREEMENT: (SCORE,), JUDGED_WORSE: (SHADOW,)}


def check_policy(policy: Policy) -> None:
    """Refuse what could not guide a rollout; recorded traffic may be judged by it all the same.

    Raises:
        InvalidPolicy: it has no steps, a gate that is never measured, or one that its traffic cannot pass in time.
    """
    if not policy.steps:
        raise InvalidPolicy("steps is empty: a rollout needs at least one that gathers evidence.")
    if not any(rule.critical for rule in policy.metrics):
        raise InvalidPolicy("metrics: none is critical, so nothing would ever roll back.")
    for rule in policy.metrics:
        _check_measured(rule, policy)
    if policy.promotes and not any(
        step.until is Until.PASS and step.kind in (SHADOW, CANARY) for step in policy.steps
    ):
        raise InvalidPolicy(
            'steps: a promotion needs a shadow or canary step with "until": "pass".'
        )
    if late := find_late_steps(policy, policy.traffic):
        raise InvalidPolicy(late[0])


def measured_on(rule: MetricRule) -> tuple[str, ...]:
    """The kinds of traffic on which a live rollout can measure a gate.

    Texts of a canary are nobody's to read, and what a copy takes, behind requests that matter more, says little.

    Raises:
        InvalidPolicy: nothing measures it: a flag or a field is unknown.
    """
    where = f"metrics.{rule.name}"
    if rule.kind is Kind.LATENCY:
        return (CANARY,)
    if rule.kind is Kind.COST:
        if rule.field != COST:
            raise InvalidPolicy(f"{where}.field={rule.field!r} is not measured: use {COST}.")
        return (CANARY,)
    if rule.kind is Kind.SCORE:
        if rule.field not in SCORES:
            known = ", ".join(SCORES)
            raise InvalidPolicy(f"{where}.field={rule.field!r} is not measured: use {known}.")
        return SCORES[rule.field]
    if unknown := sorted((rule.flags or frozenset()) - set(CATEGORIES)):
        known = ", ".join(CATEGORIES)
        raise InvalidPolicy(f"{where}.flags: {unknown[0]!r} is no flag: use {known}.")
    return (SCORE, SHADOW, CANARY) if rule.flags == frozenset() else (SHADOW,)


def _check_measured(rule: MetricRule, policy: Policy) -> None:
    where = f"metrics.{rule.name}.modes"
    possible = measured_on(rule)
    if wrong := [mode for mode in rule.modes if mode not in possible]:
        raise InvalidPolicy(
            f"{where}: it cannot be measured on {wrong[0]}; use {', '.join(possible)}"
            + (", or flags [] for failures alone." if rule.kind is Kind.FLAGS else ".")
        )
    kinds = {str(step.kind) for step in policy.steps}
    kinds |= {SHADOW for step in policy.steps if step.kind is CANARY and step.share}
    if not kinds & set(rule.modes):
        raise InvalidPolicy(
            f"{where}: it is judged on {' and '.join(rule.modes)} traffic, which no step brings."
        )
