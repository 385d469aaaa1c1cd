"""What is fixed when a rollout starts: its segments, its limits of latency, and how long it is expected to take.

All of it comes from what the incumbent answered lately, or was declared in the policy: before any outcome of the candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from controlplane.monitoring.models import RequestLog
from controlplane.rollouts.forecasts import find_late_steps, forecast_steps
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.policy import Kind, MetricRule, Policy, SegmentTraffic
from controlplane.rollouts.recordings import label_of
from controlplane.rollouts.requests import LOG_COLUMNS, row_of_log
from controlplane.rollouts.shapes import (
    limits_to_json,
    plan_from_json,
    plan_to_json,
    segment_to_text,
)
from drift.latency import Limit, fix_limit
from drift.segments import OVERALL, Column, Plan, Segment, column_of, members, plan_segments

LOOK_BACK = timedelta(days=7)
MAX_ROWS = 20_000
MAX_VALUE = 120

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """The frozen parts of a rollout's row."""

    plan: dict[str, Any]
    limits: list[list[Any]]
    forecast: list[dict[str, Any]]
    notices: list[str]


def freeze(*, policy: Policy, endpoint: str, incumbent: str, now: datetime) -> Start:
    """Choose segments, limits and expectations from the traffic of the last week, and from the policy."""
    rows = recent_rows(endpoint, incumbent, since=now - LOOK_BACK, until=now)
    columns = columns_of(rows, policy)
    plan = _plan(columns, policy)
    traffic = policy.traffic or _measure(rows, columns, plan)
    late = find_late_steps(policy, traffic) if traffic else []
    return Start(
        plan=plan_to_json(plan),
        limits=limits_to_json(fix_limits(rows, columns, plan, policy)),
        forecast=_forecast(policy, traffic),
        notices=late
        or ([] if traffic else ["There was no traffic lately to tell how long it takes."]),
    )


def frozen_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The policy as a rollout holds it.

    A live rollout judges the segments that it named beforehand, and so spends the budget of discovery on them.
    """
    return {**document, "discovery": None}


def recent_rows(endpoint: str, version: str, *, since: datetime, until: datetime) -> list[Row]:
    """What ``version`` answered on ``endpoint`` lately, the newest ``MAX_ROWS``."""
    found = (
        RequestLog.objects.of_endpoint(endpoint)
        .served_by(version)
        .filter(finished_at__gte=since, finished_at__lt=until)
        .order_by("-finished_at")
        .values_list(*LOG_COLUMNS)[:MAX_ROWS]
    )
    return [row_of_log(values, candidate="") for values in found]


def columns_of(rows: Sequence[Row], policy: Policy) -> dict[str, Column]:
    """The labels of ``rows`` for every key that a segment may have."""
    keys = {*policy.keys, *(key for crossing in policy.crossings for key in crossing)}
    keys |= {key for one in policy.traffic for key, _ in one.segment}
    return {key: column_of(_short(label_of(row, key)) for row in rows) for key in sorted(keys)}


def fix_limits(
    rows: Sequence[Row], columns: Mapping[str, Column], plan: Plan, policy: Policy
) -> dict[tuple[str, Segment], Limit]:
    """The limits that the incumbent's own requests set, of all traffic and of large segments."""
    latency_ms = np.array([row["latency_ms"] or np.nan for row in rows], dtype=np.float64)
    answered = np.array([row["outcome"] == "ok" for row in rows], dtype=np.bool_)
    limits = {}
    for rule in (rule for rule in policy.metrics if rule.kind is Kind.LATENCY):
        for segment in plan.judged:
            inside = members(segment, columns, plan, len(rows)) & answered
            limit = _limit(rule, segment, latency_ms[inside])
            if limit is not None:
                limits[rule.name, segment] = limit
    return limits


def fix_missing_limits(*, rollout: Rollout, policy: Policy, now: datetime) -> None:
    """Fix the limits that the incumbent had too few requests for when the rollout began; then they stay.

    They come from the incumbent alone, and what was counted before is not counted for them.
    """
    held = {(metric, text) for metric, text, *_ in rollout.limits}
    rules = [rule for rule in policy.metrics if rule.kind is Kind.LATENCY]
    if all((rule.name, segment_to_text(OVERALL)) in held for rule in rules):
        return
    rows = recent_rows(
        rollout.endpoint.name, rollout.incumbent.name, since=now - LOOK_BACK, until=now
    )
    plan = plan_from_json(rollout.plan)
    found = limits_to_json(fix_limits(rows, columns_of(rows, policy), plan, policy))
    limits = [*rollout.limits, *(each for each in found if (each[0], each[1]) not in held)]
    if limits != rollout.limits:
        Rollout.objects.filter(pk=rollout.pk, sealed_block=rollout.sealed_block).update(
            limits=limits
        )
        rollout.limits = limits


def _limit(rule: MetricRule, segment: Segment, latency_ms: np.ndarray[Any, Any]) -> Limit | None:
    is_large = segment == OVERALL or latency_ms.size >= rule.segment_minimum
    if not rule.judges(segment) or not is_large:
        return None
    if rule.limit_ms is not None:
        return Limit(rule.limit_ms, rule.quantile, rule.limit_ms, 0)
    return fix_limit(latency_ms, rule.quantile, rule.slack)


def _plan(columns: Mapping[str, Column], policy: Policy) -> Plan:
    """The segments with enough traffic, and those that the policy declares however little they had."""
    wanted = {key: column for key, column in columns.items() if column.names}
    plan = plan_segments(
        wanted, keys=policy.keys, crossings=policy.crossings, minimum=policy.minimum
    )
    declared = [one.segment for one in policy.traffic if one.segment not in plan.judged]
    pooled = {
        key: values - {value for segment in declared for _, value in segment if len(segment) == 1}
        for key, values in plan.pooled.items()
    }
    not_covered = tuple(each for each in plan.not_covered if each.segment not in declared)
    return Plan((*plan.judged, *declared), pooled, not_covered)


def _measure(
    rows: Sequence[Row], columns: Mapping[str, Column], plan: Plan
) -> tuple[SegmentTraffic, ...]:
    """What each judged segment brought per hour, and how often the incumbent failed on it."""
    if len(rows) < 2:
        return ()
    at = [row["ts"] for row in rows]
    hours = max((max(at) - min(at)) / 3600, 1 / 60)
    failed = np.array([row["outcome"] != "ok" for row in rows], dtype=np.bool_)
    measured = []
    for segment in plan.judged:
        inside = members(segment, columns, plan, len(rows))
        n = int(inside.sum())
        if n:
            loss_rate = (int(failed[inside].sum()) + 1) / (n + 2)
            measured.append(SegmentTraffic(segment, n / hours, min(0.5, loss_rate)))
    return tuple(measured)


def _forecast(policy: Policy, traffic: Sequence[SegmentTraffic]) -> list[dict[str, Any]]:
    return [
        {
            "step": index,
            "metric": each.metric,
            "segment": segment_to_text(each.segment),
            "num": each.to_pass.num,
            "hours": each.to_pass.hours,
            "hours_to_fail": each.to_fail.hours,
        }
        for index, _, expectations in forecast_steps(policy, traffic)
        for each in expectations
    ]


def _short(value: str | None) -> str | None:
    """Values that are no names of anything are not judged one by one."""
    return value if value is not None and len(value) <= MAX_VALUE else None
