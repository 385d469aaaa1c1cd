"""Looking at what was counted: boards for the gates, their verdict, and the record of what was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from django.db import transaction

from controlplane.events.services import record
from controlplane.rollouts.gates import Board, Decision, Judgement, judge, look
from controlplane.rollouts.machine import State
from controlplane.rollouts.models import Look, Rollout, SegmentCount
from controlplane.rollouts.policy import Kind, MetricRule, Policy
from controlplane.rollouts.shapes import (
    Limits,
    counts_from_json,
    limits_from_json,
    memory_from_json,
    memory_to_json,
    plan_from_json,
    segment_to_text,
)
from drift.eprocess import DIFFERENCE
from drift.ratio import ALPHA, Arms, expected_candidates, log_e_of_imbalance
from drift.segments import OVERALL, Plan, Segment, describe
from drift.verdict import Result, Verdict

IMBALANCED, UNCOVERED = "sample ratio", "coverage"
# What the event is called when a notice is given for the first time.
NOTICES = {IMBALANCED: "sample_ratio_off", UNCOVERED: "coverage_low"}
MAX_REASON = 500
# Of fewer copies no share is told.
LEAST_INTENDED = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look says: the verdict, what it means, why, and the numbers of each gate."""

    verdict: Verdict
    decision: Decision
    reason: str
    log_e_rollback: float
    results: list[dict[str, Any]]
    notices: list[str]


def judge_again(*, rollout: Rollout, policy: Policy, now: datetime) -> Rollout:
    """Look at what was counted since the last look, if anything was, and record what it says.

    It may be repeated: evidence is a function of the counts, and what has been shown once stays shown.
    """
    if rollout.looked_block == rollout.sealed_block:
        return rollout
    plan = plan_from_json(rollout.plan)
    boards = boards_of(rollout, policy, plan)
    memory = look(boards, memory_from_json(rollout.memory), policy)
    judgement = judge(boards, memory, policy, not_covered=plan.not_covered)
    seen = _weigh(judgement, tell_imbalance(rollout), tell_coverage(rollout, policy), policy)
    values: dict[str, Any] = {
        "looked_block": rollout.sealed_block,
        "num_looks": rollout.num_looks + 1,
        "memory": memory_to_json(memory),
    }
    if rollout.state != State.BAKING or seen.decision is Decision.ROLLBACK:
        # What was promoted was promoted by a pass; a later look can find harm, and nothing else that matters.
        values |= {
            "verdict": seen.verdict,
            "decision": seen.decision,
            "verdict_reason": seen.reason,
        }
    with transaction.atomic():
        is_first = Rollout.objects.filter(
            pk=rollout.pk, num_looks=rollout.num_looks, state=rollout.state
        ).update(**values)
        if is_first:
            _write_look(rollout, seen, now)
    return Rollout.objects.with_names().get(pk=rollout.pk)


def boards_of(rollout: Rollout, policy: Policy, plan: Plan) -> list[Board]:
    """One board per metric, with a row for every segment it is asked for: what has no counts has shown nothing."""
    rows = {(row.metric, row.segment): row for row in SegmentCount.objects.filter(rollout=rollout)}
    limits = limits_from_json(rollout.limits)
    return [_board(rule, plan, limits, rows) for rule in policy.metrics]


def tell_imbalance(rollout: Rollout) -> str:
    """Why the two arms of the canary may not be compared; empty where they share the users as intended."""
    periods = [
        Arms(int(share) / 10_000, numbers[0], numbers[1]) for share, numbers in rollout.arms.items()
    ]
    if log_e_of_imbalance(periods) < -math.log(ALPHA):
        return ""
    found = sum(period.num_candidate for period in periods)
    return (
        f"{IMBALANCED}: the candidate met {found:,} users and should have met {expected_candidates(periods):,.0f}; what "
        "sends users to one arm may also be what makes them differ, so nothing is passed."
    )


def tell_coverage(rollout: Rollout, policy: Policy) -> str:
    """How few of the copies that were meant to be compared were; empty while they are enough."""
    rows = SegmentCount.objects.filter(rollout=rollout, segment=segment_to_text(OVERALL))
    row = max(rows, key=lambda row: row.num_intended, default=None)
    if row is None or row.num_intended < LEAST_INTENDED or _coverage(row) >= policy.min_coverage:
        return ""
    num_compared = row.num_intended - row.num_dropped
    return (
        f"{UNCOVERED}: {num_compared:,} of {row.num_intended:,} copies were compared, fewer than the "
        f"{policy.min_coverage:.0%} that a pass needs."
    )


def failing_gates(rollout: Rollout) -> tuple[str, ...]:
    """The gates that are not critical and have failed at the last look."""
    last = rollout.looks.order_by("-number").first()
    if last is None:
        return ()
    return tuple(
        f"{result['metric']} on {result['name']}"
        for result in last.results
        if result["verdict"] == Verdict.FAIL and not result["is_critical"]
    )


def undecided_gate(rollout: Rollout, modes: frozenset[str], policy: Policy) -> str:
    """The first gate judged on these kinds of traffic that has not passed everywhere, as its sentence."""
    rules = {rule.name for rule in policy.metrics if set(rule.modes) & modes}
    last = rollout.looks.order_by("-number").first()
    if last is None:
        return "nothing was counted yet" if rules else ""
    if imbalance := tell_imbalance(rollout):
        return imbalance
    waiting = (
        result["sentence"]
        for result in last.results
        if result["metric"] in rules and result["verdict"] != Verdict.PASS
    )
    return next(waiting, "")


def _board(
    rule: MetricRule, plan: Plan, limits: Limits, rows: Mapping[tuple[str, str], SegmentCount]
) -> Board:
    segments = _judged(rule, plan, limits)
    found = [rows.get((rule.name, segment_to_text(segment))) for segment in segments]
    is_latency = rule.kind is Kind.LATENCY
    num_cells = rule.support.num_cells
    held = [limits.get((rule.name, segment)) for segment in segments] if is_latency else []
    is_matched = is_latency and rule.limit_ms is None
    has_no_limit = is_latency and held[0] is None
    return Board(
        rule=rule,
        segments=segments,
        numbers=(0,) * len(segments),
        counts=np.stack([counts_from_json(row.counts if row else {}, num_cells) for row in found]),
        coverage=np.array([_coverage(row) for row in found]),
        matched=np.stack(
            [counts_from_json((row and row.matched) or {}, DIFFERENCE.num_cells) for row in found]
        )
        if is_matched
        else None,
        limits_ms=tuple(limit.limit_ms if limit else None for limit in held),
        missing="the incumbent has too few requests to fix a limit." if has_no_limit else "",
        may_come=has_no_limit,
    )


def _judged(rule: MetricRule, plan: Plan, limits: Limits) -> tuple[Segment, ...]:
    asked = [segment for segment in plan.judged if rule.judges(segment)]
    if rule.kind is Kind.LATENCY:
        asked = [s for s in asked if s == OVERALL or (rule.name, s) in limits]
    return tuple(asked)


def _coverage(row: SegmentCount | None) -> float:
    if row is None or not row.num_intended:
        return 1.0
    return 1 - row.num_dropped / row.num_intended


def _weigh(judgement: Judgement, imbalance: str, uncovered: str, policy: Policy) -> Seen:
    """The judgement, unless the arms are no fair comparison: then nothing is passed, and harm still counts."""
    critical = {rule.name for rule in policy.metrics if rule.critical}
    results = [
        _result_to_json(result, is_critical=result.metric in critical)
        for result in judgement.results
    ]
    verdict, decision, reason = judgement.verdict, judgement.decision, judgement.reason
    if imbalance and decision is not Decision.ROLLBACK:
        verdict, decision, reason = Verdict.ERROR, Decision.INCONCLUSIVE, imbalance
    notices = [notice for notice in (imbalance, uncovered) if notice]
    return Seen(verdict, decision, reason, judgement.log_e_rollback, results, notices)


def _write_look(rollout: Rollout, seen: Seen, now: datetime) -> None:
    """A new row where it says something else than the last one, which it else takes the place of."""
    number = rollout.num_looks + 1
    row = rollout.looks.order_by("-number").first()
    known = {notice.partition(":")[0] for notice in (row.notices if row else ())}
    for notice in seen.notices:
        if notice.partition(":")[0] not in known:
            _record(rollout, notice, now)
    if row is None or _says(row.results, row.decision) != _says(seen.results, seen.decision):
        row = Look(rollout=rollout, since=now)
    row.number, row.at, row.step_index = number, now, rollout.step_index
    row.verdict, row.decision, row.reason = seen.verdict, seen.decision, seen.reason
    row.log_e_rollback, row.results, row.notices = seen.log_e_rollback, seen.results, seen.notices
    row.save()


def _record(rollout: Rollout, notice: str, now: datetime) -> None:
    """An event when something begins to be wrong with the evidence; it is no move, and carries no version."""
    record(
        type=f"rollout.{NOTICES[notice.partition(':')[0]]}",
        subject=rollout.subject,
        actor="rollouts",
        reason=notice[:MAX_REASON],
        now=now,
        data={"endpoint": rollout.endpoint.name, "candidate": rollout.candidate.name},
    )


def _says(results: list[dict[str, Any]], decision: str) -> tuple[str, ...]:
    """What a look comes down to: its decision, and the verdict of each gate."""
    return (str(decision), *(str(result["verdict"]) for result in results))


def _result_to_json(result: Result, *, is_critical: bool) -> dict[str, Any]:
    bounds, evidence = result.bounds, result.evidence
    return {
        "metric": result.metric,
        "segment": segment_to_text(result.segment),
        "name": describe(result.segment),
        "verdict": str(result.verdict),
        "n": result.n,
        "estimate": bounds.estimate if bounds else None,
        "lower": bounds.lower if bounds else None,
        "upper": bounds.upper if bounds else None,
        "tolerance": result.tolerance,
        "margin": result.margin,
        "log_e_harm": evidence.log_harm if evidence else None,
        "log_e_safe": evidence.log_safe if evidence else None,
        "needed": result.num_needed,
        "sentence": result.sentence,
        "is_critical": is_critical,
    }
