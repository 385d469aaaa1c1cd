"""The numbers of each gate: one metric on one segment a row, as the last look saw it and as each arm had it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.rollouts.judging import boards_of
from controlplane.rollouts.models import Rollout, SegmentCount
from controlplane.rollouts.policy import Policy, parse_policy
from controlplane.rollouts.shapes import plan_from_json, segment_from_text, segment_to_text
from drift.segments import describe
from drift.verdict import SEVERITY, Verdict

# Near the end of what a float can hold; evidence beyond it convinces nobody more.
MAX_LOG = 700.0


@dataclass(frozen=True, slots=True)
class GateRow:
    """One metric on one segment, as the last look saw it; numbers are None below the minimum sample.

    ``incumbent`` and ``candidate`` are the mean of what was measured in each arm. ``e_harm`` speaks for "worse than the
    tolerance", ``e_safe`` for "no worse than the margin".
    """

    metric: str
    kind: str
    segment: dict[str, str]
    name: str
    verdict: str
    n: int
    estimate: float | None
    lower: float | None
    upper: float | None
    tolerance: float
    margin: float
    e_harm: float | None
    e_safe: float | None
    needed: int | None
    sentence: str
    is_critical: bool
    incumbent: float | None
    candidate: float | None
    coverage: float | None


def gates_of(rollout: Rollout) -> list[GateRow]:
    """Each metric on each segment, the worst verdicts first; before the first look nothing is decided."""
    policy = parse_policy(rollout.document)
    counts = {
        (row.metric, row.segment): row for row in SegmentCount.objects.filter(rollout=rollout)
    }
    kinds = {rule.name: str(rule.kind) for rule in policy.metrics}
    last = rollout.looks.order_by("-number").first()
    results = last.results if last else _not_yet(rollout, policy)
    rows = [
        _gate(result, kinds, counts.get((result["metric"], result["segment"])))
        for result in results
    ]
    order = {str(verdict): place for place, verdict in enumerate(SEVERITY)}
    return sorted(
        rows, key=lambda row: (order[row.verdict], row.metric, len(row.segment), row.name)
    )


def _not_yet(rollout: Rollout, policy: Policy) -> list[dict[str, Any]]:
    """What a look before anything was counted would hold."""
    return [
        {
            "metric": board.rule.name,
            "segment": segment_to_text(segment),
            "name": describe(segment),
            "verdict": str(Verdict.INCONCLUSIVE),
            "n": 0,
            "tolerance": board.rule.tolerance,
            "margin": float(margin),
            "needed": board.rule.minimum,
            "sentence": board.missing or "nothing was counted yet",
            "is_critical": board.rule.critical,
        }
        for board in boards_of(rollout, policy, plan_from_json(rollout.plan))
        for segment, margin in zip(board.segments, board.margins, strict=True)
    ]


def _gate(
    result: Mapping[str, Any], kinds: Mapping[str, str], counts: SegmentCount | None
) -> GateRow:
    means = _means(counts)
    return GateRow(
        metric=result["metric"],
        kind=kinds.get(result["metric"], ""),
        segment=dict(segment_from_text(result["segment"])),
        name=result["name"],
        verdict=result["verdict"],
        n=result["n"],
        estimate=result.get("estimate"),
        lower=result.get("lower"),
        upper=result.get("upper"),
        tolerance=result["tolerance"],
        margin=result["margin"],
        e_harm=_e_value(result.get("log_e_harm")),
        e_safe=_e_value(result.get("log_e_safe")),
        needed=result["needed"],
        sentence=result["sentence"],
        is_critical=result["is_critical"],
        incumbent=means[0],
        candidate=means[1],
        coverage=_coverage(counts),
    )


def _means(counts: SegmentCount | None) -> tuple[float | None, float | None]:
    if counts is None:
        return None, None
    return (
        counts.sum_incumbent / counts.num_incumbent if counts.num_incumbent else None,
        counts.sum_candidate / counts.num_candidate if counts.num_candidate else None,
    )


def _coverage(counts: SegmentCount | None) -> float | None:
    if counts is None or not counts.num_intended:
        return None
    return 1 - counts.num_dropped / counts.num_intended


def _e_value(log_e: float | None) -> float | None:
    return None if log_e is None else math.exp(min(log_e, MAX_LOG))
