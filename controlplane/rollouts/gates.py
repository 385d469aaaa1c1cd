"""From counts to verdicts: per metric and segment, and of the whole. Values in, values out; the same live and replayed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.rollouts.policy import Kind, MetricRule, Policy
from drift.eprocess import (
    DIFFERENCE,
    Counts,
    Floats,
    Side,
    confidence_sequence,
    e_bh,
    log_average,
    log_e_values,
    num_until,
    spending_weight,
)
from drift.segments import OVERALL, NotCovered, Segment
from drift.segments import describe as describe_segment
from drift.verdict import Bounds, Evidence, Result, Verdict, worst

Mask = NDArray[np.bool_]
Stream = tuple[str, Segment]


class Decision(StrEnum):
    """What the verdict means for a rollout."""

    PROMOTE = "promote"
    ROLLBACK = "rollback"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Board:
    """The counts of one metric, one row per segment.

    ``numbers`` is 0 for a declared segment and j for the j-th that was discovered. ``matched`` holds, for a rate, the
    differences to incumbent requests of the same segment and block: a rush that slows both arms is no fault of one.
    ``missing`` says why nothing could be measured; the metric then is an ERROR, or with ``may_come`` INCONCLUSIVE, and
    ``num_unusable`` is how many observations wait for it.
    """

    rule: MetricRule
    segments: tuple[Segment, ...]
    numbers: tuple[int, ...]
    counts: Counts  # [num_segments, num_cells]
    coverage: Floats  # [num_segments]
    matched: Counts | None = None  # [num_segments, num_cells of DIFFERENCE]
    limits_ms: tuple[float | None, ...] = ()
    missing: str = ""
    may_come: bool = False
    num_unusable: int = 0

    @property
    def margins(self) -> Floats:
        """The margin of each segment. [num_segments]"""
        rule = self.rule
        return np.array(
            [rule.margin if s != OVERALL else rule.overall_margin for s in self.segments]
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """The highest evidence of all looks so far, in logarithms: what has been shown once stays shown.

    ``named`` are the segments that e-BH named at the look that decided for a rollback.
    """

    harm: Mapping[Stream, float] = field(default_factory=dict)
    safe: Mapping[Stream, float] = field(default_factory=dict)
    rollback: float = 0.0
    named: frozenset[Stream] = frozenset()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of the whole, and why."""

    verdict: Verdict
    decision: Decision
    reason: str
    log_e_rollback: float
    log_threshold: float
    results: tuple[Result, ...]
    not_covered: tuple[NotCovered, ...]
    notices: tuple[str, ...]


def look(boards: Sequence[Board], memory: Memory, policy: Policy) -> Memory:
    """What is remembered after looking at ``boards``. It may be called after every observation, and again."""
    harm = {stream: value for board in boards for stream, value in _rows(board, log_harm(board))}
    safe = {stream: value for board in boards for stream, value in _rows(board, log_safe(board))}
    share = budget_shares([board for board in boards if board.rule.critical], policy)
    evidence = np.array([harm[stream] for stream in share])
    weights = np.array(list(share.values()))
    # Slices not yet discovered stand in the average with the 1 that everyone starts with.
    rest = max(0.0, 1 - float(weights.sum()))
    total = log_average(np.append(evidence, 0.0), np.append(weights, rest))
    seen = replace(
        memory,
        harm=_highest(memory.harm, harm),
        safe=_highest(memory.safe, safe),
        rollback=max(memory.rollback, total),
    )
    if memory.rollback < -math.log(policy.alpha) <= total:
        rejected = e_bh(evidence + np.log(weights * weights.size), policy.alpha)
        return replace(seen, named=frozenset(itertools.compress(share, rejected)))
    return seen


def budget_shares(boards: Sequence[Board], policy: Policy) -> dict[Stream, float]:
    """How much of the risk of a false rollback each stream may spend: the weight of its evidence.

    Metrics share alike, so that one judged on all traffic alone is not drowned by one judged on fifty segments; so do
    the declared segments of a metric. Discovered ones spend half of the budget, each less than the one before. Metrics
    that are not critical never roll back; they share a budget of their own, for holding a rollout up.
    """
    declared = 0.5 if policy.discovery else 1.0
    shares = {}
    num_metrics = Counter(board.rule.critical for board in boards)
    for board in boards:
        num_boards = num_metrics[board.rule.critical]
        num_declared = board.numbers.count(0)
        for segment, number in zip(board.segments, board.numbers, strict=True):
            share = (
                declared / num_boards / num_declared if not number else spending_weight(number) / 2
            )
            shares[board.rule.name, segment] = share
    return shares


def judge(
    boards: Sequence[Board],
    memory: Memory,
    policy: Policy,
    *,
    not_covered: Iterable[NotCovered] = (),
    notices: Iterable[str] = (),
) -> Judgement:
    """The verdict on ``boards``, which ``memory`` has looked at.

    ROLLBACK: the weighted average over all segments of the evidence of harm has once reached 1 / alpha, of metrics that
    are critical. PROMOTE: every declared
    segment has once shown at level alpha that it is no worse than its margin; no correction is needed, because
    promotion is wrong only if one particular segment is wrong. Everything else is INCONCLUSIVE, or an ERROR.
    """
    shares = budget_shares(boards, policy)
    results = [result for board in boards for result in _judge_board(board, memory, policy, shares)]
    threshold = -math.log(policy.alpha)
    declared = worst(result.verdict for result in results if not result.number)
    if memory.rollback >= threshold:
        verdict, decision = Verdict.FAIL, Decision.ROLLBACK
    elif declared is Verdict.PASS:
        verdict, decision = Verdict.PASS, Decision.PROMOTE
    else:
        verdict, decision = declared, Decision.INCONCLUSIVE
    return Judgement(
        verdict,
        decision,
        _reason(decision, results),
        memory.rollback,
        threshold,
        tuple(results),
        tuple(not_covered),
        tuple(notices),
    )


def log_harm(board: Board) -> Floats:
    """Evidence, per segment, that the candidate is worse than the tolerance. [num_segments]

    For a rate it must be both above the tolerance and above the incumbent's of the same time: the lesser of two
    e-values is one for "at least one of the two nulls is true".
    """
    tolerance = board.rule.tolerance
    evidence = log_e_values(board.counts, board.rule.support, tolerance, Side.ABOVE)
    if board.matched is None:
        return evidence
    against = log_e_values(board.matched, DIFFERENCE, 0.0, Side.ABOVE)
    return np.minimum(evidence, against)


def log_safe(board: Board) -> Floats:
    """Evidence, per segment, that the candidate is no worse than the margin. [num_segments]"""
    return log_e_values(board.counts, board.rule.support, board.margins, Side.BELOW)


def _rows(board: Board, values: Floats) -> Iterable[tuple[Stream, float]]:
    return (
        ((board.rule.name, segment), float(value))
        for segment, value in zip(board.segments, values, strict=True)
    )


def _highest(old: Mapping[Stream, float], new: Mapping[Stream, float]) -> dict[Stream, float]:
    return {stream: max(value, old.get(stream, -math.inf)) for stream, value in new.items()}


def _judge_board(
    board: Board, memory: Memory, policy: Policy, shares: Mapping[Stream, float]
) -> Iterable[Result]:
    n = board.counts.sum(axis=-1)
    lower, upper = confidence_sequence(board.counts, board.rule.support, min(1.0, 2 * policy.alpha))
    middles = board.rule.support.middles()
    for row, segment in enumerate(board.segments):
        size = int(n[row])
        estimate = float(board.counts[row] @ middles / size) if size else math.nan
        yield _judge_stream(
            board,
            row,
            Bounds(estimate, float(lower[row]), float(upper[row])),
            _evidence((board.rule.name, segment), memory, policy, shares),
            is_named=(board.rule.name, segment) in memory.named,
            policy=policy,
        )


def _evidence(
    stream: Stream, memory: Memory, policy: Policy, shares: Mapping[Stream, float]
) -> Evidence:
    return Evidence(
        log_harm=memory.harm.get(stream, 0.0),
        log_harm_threshold=-math.log(policy.alpha * shares[stream]),
        log_safe=memory.safe.get(stream, 0.0),
        log_safe_threshold=-math.log(policy.alpha),
    )


def _judge_stream(
    board: Board, row: int, bounds: Bounds, evidence: Evidence, *, is_named: bool, policy: Policy
) -> Result:
    rule, segment = board.rule, board.segments[row]
    size = int(board.counts[row].sum())
    margin = float(board.margins[row])
    has_failed = is_named or evidence.log_harm >= evidence.log_harm_threshold
    result = Result(
        metric=rule.name,
        segment=segment,
        verdict=Verdict.INCONCLUSIVE,
        n=size,
        tolerance=rule.tolerance,
        margin=margin,
        bounds=None,
        evidence=None,
        num_needed=None,
        sentence="",
        number=board.numbers[row],
    )
    if board.missing:
        verdict = Verdict.INCONCLUSIVE if board.may_come else Verdict.ERROR
        told = _sentence(rule, segment, board.missing)
        return replace(result, verdict=verdict, n=board.num_unusable, sentence=told)
    if size < rule.minimum and not has_failed:
        told = (
            f"n too small: {size} of the {rule.minimum} observations that it takes to say anything."
        )
        return replace(
            result, num_needed=rule.minimum - size, sentence=_sentence(rule, segment, told)
        )
    shown = replace(
        result, bounds=_hold(bounds, evidence, rule.tolerance, margin), evidence=evidence
    )
    if has_failed:
        return _told(
            shown, rule, Verdict.FAIL, f"worse than the tolerance of {_show(rule, rule.tolerance)}"
        )
    if evidence.log_safe >= evidence.log_safe_threshold:
        if board.coverage[row] >= policy.min_coverage:
            return _told(
                shown, rule, Verdict.PASS, f"no worse than the margin of {_show(rule, margin)}"
            )
        told = f"good so far, but only {board.coverage[row]:.0%} of the intended comparisons were observed"
        return _told(shown, rule, Verdict.INCONCLUSIVE, told)
    needed = _num_needed(board, row, bounds.estimate, evidence)
    told = (
        "no verdict is in sight at this rate"
        if needed is None
        else f"about {needed:,} more are needed"
    )
    return _told(replace(shown, num_needed=needed), rule, Verdict.INCONCLUSIVE, told)


def _hold(bounds: Bounds, evidence: Evidence, tolerance: float, margin: float) -> Bounds:
    """What an earlier look has excluded stays excluded, as far as the estimate of today agrees."""
    lower, upper = bounds.lower, bounds.upper
    if evidence.log_harm >= evidence.log_safe_threshold:
        lower = max(lower, min(tolerance, bounds.estimate))
    if evidence.log_safe >= evidence.log_safe_threshold:
        upper = min(upper, max(margin, bounds.estimate))
    return Bounds(bounds.estimate, lower, upper)


def _num_needed(board: Board, row: int, estimate: float, evidence: Evidence) -> int | None:
    """To the verdict on whose side the estimate lies; harm first, because it is what an engineer waits for."""
    counts, support = board.counts[row], board.rule.support
    if estimate > board.rule.tolerance:
        return num_until(
            counts, support, board.rule.tolerance, Side.ABOVE, evidence.log_harm_threshold
        )
    margin = float(board.margins[row])
    return num_until(counts, support, margin, Side.BELOW, evidence.log_safe_threshold)


def _told(result: Result, rule: MetricRule, verdict: Verdict, told: str) -> Result:
    bounds = result.bounds
    if bounds is None:
        return replace(result, verdict=verdict, sentence=_sentence(rule, result.segment, told))
    numbers = (
        f"{_show(rule, bounds.estimate)} (between {_show(rule, bounds.lower)} and {_show(rule, bounds.upper)}) "
        f"over {result.n:,} observations: {told}."
    )
    return replace(result, verdict=verdict, sentence=_sentence(rule, result.segment, numbers))


def _sentence(rule: MetricRule, segment: Segment, told: str) -> str:
    return f"{rule.name} on {describe_segment(segment)}: {told}"


def _show(rule: MetricRule, value: float) -> str:
    """Rates in percent, differences in points."""
    if rule.kind is Kind.LATENCY:
        return f"{100 * value:.2f} %"
    return f"{100 * value:+.1f} points"


def _reason(decision: Decision, results: Sequence[Result]) -> str:
    by_verdict = {
        verdict: [result for result in results if result.verdict is verdict] for verdict in Verdict
    }
    failed = by_verdict[Verdict.FAIL]
    if decision is Decision.PROMOTE:
        return f"All {len(by_verdict[Verdict.PASS])} declared segments and metrics are no worse than their margins."
    if decision is Decision.ROLLBACK and failed:
        return (
            failed[0].sentence
            if len(failed) == 1
            else f"{len(failed)} segments failed, first {failed[0].sentence}"
        )
    if decision is Decision.ROLLBACK:
        return "The segments together show that the candidate is worse; no single one can be named yet."
    if not results:
        return "Nothing was measured."
    if failed:
        return failed[0].sentence
    errors = by_verdict[Verdict.ERROR]
    if errors:
        return errors[0].sentence
    waiting = by_verdict[Verdict.INCONCLUSIVE]
    return f"{len(waiting)} of {len(results)} segments and metrics are undecided, first {waiting[0].sentence}"
