"""From requests and what was measured on them to streams of observations, one per metric and segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.rollouts.gates import Board
from controlplane.rollouts.policy import CANARY, SHADOW, Kind, MetricRule, Policy
from drift.coverage import coverage_of, find_informative_dropping
from drift.discovery import propose
from drift.eprocess import DIFFERENCE, Counts, Floats, cells_of
from drift.latency import Limit, exceedances, fix_limit
from drift.matching import Comparable, Matches, Traffic, find_comparable, match_blocks
from drift.segments import OVERALL, Column, Columns, Plan, Segment, describe, members, plan_segments

Mask = NDArray[np.bool_]
Integers = NDArray[np.int64]

# Between the ends of blocks pairs are looked at this often.
OBSERVATIONS_PER_LOOK = 1_000
NOTHING: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests of both arms with what was measured on each; NaN where it was not.

    ``losses`` is a column per metric that compares answers, ``failed`` are requests without an answer.
    """

    traffic: Traffic
    columns: Columns
    losses: Mapping[str, Floats]  # each [num_requests]
    latency_ms: Floats  # [num_requests]
    failed: Mask  # [num_requests]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Observations as cells of a histogram, in the order in which they become known."""

    known_at: Floats  # [num_observations], ascending
    cells: Counts  # [num_observations]

    def counts(self, num_cells: int, after: float, until: float) -> Counts:
        """The histogram of what became known after one moment and until another. [num_cells]"""
        start, end = np.searchsorted(self.known_at, [after, until], side="right")
        return np.bincount(self.cells[start:end], minlength=num_cells).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Frozen:
    """What a live rollout has fixed before its first observation: segments, and limits by metric and segment.

    A limit that is missing is not judged; what is counted piece by piece must not depend on the piece.
    """

    plan: Plan
    limits: Mapping[tuple[str, Segment], Limit]


@dataclass(frozen=True, slots=True)
class Stream:
    """One metric on one segment, over all of the recording."""

    rule: MetricRule
    segment: Segment
    observed: Timeline
    coverage: float
    matched: Timeline | None = None
    limit: Limit | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Missing:
    """A metric that could not be measured, and whether more traffic would help."""

    rule: MetricRule
    why: str
    may_come: bool
    n: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a replay needs: what may be compared, which segments are judged, and their streams."""

    recording: Recording
    policy: Policy
    comparable: Comparable
    plan: Plan
    streams: tuple[Stream, ...]
    missing: tuple[Missing, ...]
    notices: tuple[str, ...]
    frozen: Frozen | None = None


def observe(recording: Recording, policy: Policy, frozen: Frozen | None = None) -> Observed:
    """Collect the observations of each segment: those that are ``frozen``, or those with enough traffic."""
    comparable = find_comparable(
        recording.traffic, users_once_per_block=policy.users_once_per_block
    )
    plan = frozen.plan if frozen else _plan(recording, comparable, policy)
    observed = Observed(recording, policy, comparable, plan, (), (), (), frozen)
    streams: list[Stream] = []
    missing: list[Missing] = []
    notices = _notices(recording, comparable)
    for rule in policy.metrics:
        if not _is_asked(rule, recording.traffic):
            notices.append(
                f"{rule.name} was not asked for: it is judged on {' and '.join(rule.modes)} traffic alone, "
                "and the candidate had none."
            )
            continue
        why = _why_missing(rule, observed)
        if why is not None:
            missing.append(why)
            continue
        streams += [
            stream
            for segment in plan.judged
            if rule.judges(segment) and (stream := stream_of(observed, rule, segment))
        ]
    return Observed(
        recording, policy, comparable, plan, tuple(streams), tuple(missing), tuple(notices)
    )


def stream_of(
    observed: Observed,
    rule: MetricRule,
    segment: Segment,
    *,
    after: float = -np.inf,
    number: int = 0,
) -> Stream | None:
    """The observations of one metric on one segment that become known later than ``after``.

    None where a rate is not judged on a segment of this size.
    """
    recording = observed.recording
    inside = members(segment, recording.columns, observed.plan, recording.traffic.at.size)
    if rule.kind is Kind.LATENCY:
        return _latency_stream(observed, rule, segment, inside)
    matches = _matches(observed, rule, inside)
    matches = matches.select(matches.known_at > after)
    coverage = coverage_of(
        observed.comparable.dropped & inside, observed.comparable.intended & inside
    )
    timeline = _timeline(matches.known_at, _compare(rule, recording, matches))
    return Stream(rule, segment, timeline, coverage, number=number)


def board_of(
    rule: MetricRule, streams: Sequence[Stream], counts: Counts, matched: Counts | None
) -> Board:
    """The counts of the streams of one metric, ready for the gates. ``counts`` is [num_streams, num_cells]."""
    return Board(
        rule=rule,
        segments=tuple(stream.segment for stream in streams),
        numbers=tuple(stream.number for stream in streams),
        counts=counts,
        coverage=np.array([stream.coverage for stream in streams]),
        matched=matched,
        limits_ms=tuple(stream.limit.limit_ms if stream.limit else None for stream in streams),
    )


def missing_board(missing: Missing) -> Board:
    """The board of a metric that could not be measured."""
    return Board(
        rule=missing.rule,
        segments=(OVERALL,),
        numbers=(0,),
        counts=np.zeros((1, missing.rule.support.num_cells), dtype=np.int64),
        coverage=np.ones(1),
        missing=missing.why,
        num_unusable=missing.n,
        may_come=missing.may_come,
    )


def look_times(observed: Observed) -> Floats:
    """When a replay looks: at the end of every block with something new, and within it after so many pairs."""
    known_at = np.unique(
        np.concatenate([NOTHING, *(stream.observed.known_at for stream in observed.streams)])
    )
    block_s = observed.policy.block_s
    ends = np.unique(np.ceil(known_at / block_s) * block_s)
    return np.unique(np.concatenate([ends, known_at[OBSERVATIONS_PER_LOOK::OBSERVATIONS_PER_LOOK]]))


def discovery_rule(policy: Policy) -> MetricRule | None:
    """The metric whose differences slices are discovered on: the first that compares answers."""
    if policy.discovery is None:
        return None
    return next((rule for rule in policy.metrics if rule.kind is not Kind.LATENCY), None)


def past_differences(observed: Observed, rule: MetricRule) -> tuple[Matches, Floats]:
    """All comparisons of one metric, matched within all keys at once, so that no key alone explains a difference."""
    recording = observed.recording
    everyone = np.ones(recording.traffic.at.size, dtype=np.bool_)
    codes = [column.codes.astype(np.int64) for _, column in sorted(recording.columns.items())]
    stratum = _one_number(codes, everyone.size)
    matches = _matches(observed, rule, everyone, stratum)
    differences = _compare(rule, recording, matches)
    is_known = ~np.isnan(differences)
    return matches.select(is_known), differences[is_known]


def propose_segment(
    observed: Observed,
    rule: MetricRule,
    past: tuple[Matches, Floats],
    until: float,
    known: frozenset[Segment],
) -> Segment | None:
    """The slice where the candidate looks worst in what was known at ``until``, if it is a new one."""
    matches, differences = past
    discovery = observed.policy.discovery
    size = int(np.searchsorted(matches.known_at, until, side="right"))
    if discovery is None or not size:
        return None
    # A shadow copy carries no labels of its own; its request does.
    columns = _subset(observed.recording.columns, matches.first_controls[:size])
    proposal = propose(
        columns,
        differences[:size],
        tolerance=rule.tolerance,
        minimum=discovery.minimum,
        known=known,
    )
    return proposal.segment if proposal else None


def _plan(recording: Recording, comparable: Comparable, policy: Policy) -> Plan:
    """Sizes count what can become an observation: pairs, and candidate requests that wait for controls."""
    waiting = np.flatnonzero(comparable.pool & recording.traffic.is_candidate)
    rows = np.concatenate([comparable.pairs.controls, waiting])
    return plan_segments(
        _subset(recording.columns, rows),
        keys=policy.keys,
        crossings=policy.crossings,
        minimum=policy.minimum,
    )


def _is_asked(rule: MetricRule, traffic: Traffic) -> bool:
    """Whether the candidate had the kind of traffic that this metric is judged on; if it had none, all are asked."""
    had = {
        mode
        for mode, is_mode in ((SHADOW, traffic.is_shadow), (CANARY, ~traffic.is_shadow))
        if (is_mode & traffic.is_candidate).any()
    }
    return not had or bool(had & set(rule.modes))


def _why_missing(rule: MetricRule, observed: Observed) -> Missing | None:
    recording = observed.recording
    rows = recording.traffic.is_candidate & _in_modes(rule, recording.traffic)
    if rule.kind is not Kind.LATENCY:
        if rows.any() and np.isnan(recording.losses[rule.name][rows]).all():
            return Missing(rule, f"no candidate request has {rule.field!r}.", may_come=False)
        return None
    if rows.any() and np.isnan(recording.latency_ms[rows]).all():
        return Missing(rule, "no candidate request has a latency.", may_come=False)
    everyone = np.ones(rows.size, dtype=np.bool_)
    if _limit(rule, OVERALL, observed, everyone) is None:
        told = "the incumbent has too few requests of the same kind to fix a limit."
        return Missing(rule, told, may_come=True, n=int(rows.sum()))
    return None


def _matches(
    observed: Observed, rule: MetricRule, inside: Mask, stratum: Integers | None = None
) -> Matches:
    """Pairs and matched requests of a segment, of the kinds of traffic that count."""
    traffic, comparable = observed.recording.traffic, observed.comparable
    pairs = comparable.pairs
    is_shadow = traffic.is_shadow[pairs.candidates]
    belongs = inside[pairs.controls] & (is_shadow | inside[pairs.candidates])
    counts = _in_modes(rule, traffic)[pairs.candidates]
    kept = pairs.select(belongs & counts)
    if CANARY not in rule.modes:
        return kept
    return kept.joined(match_blocks(traffic, comparable.pool & inside, stratum))


def _compare(rule: MetricRule, recording: Recording, matches: Matches) -> Floats:
    values = recording.losses[rule.name]
    return matches.ratios(values) if rule.kind is Kind.COST else matches.differences(values)


def _latency_stream(
    observed: Observed, rule: MetricRule, segment: Segment, inside: Mask
) -> Stream | None:
    recording = observed.recording
    traffic = recording.traffic
    counts = inside & _in_modes(rule, traffic)
    of_candidate = counts & (
        observed.comparable.answered | (traffic.is_candidate & traffic.is_shadow)
    )
    limit = _limit(rule, segment, observed, inside)
    is_small = not observed.frozen and of_candidate.sum() < rule.segment_minimum
    if limit is None or (segment != OVERALL and is_small):
        return None
    exceeded = exceedances(recording.latency_ms, recording.failed, limit.limit_ms)
    known_at = traffic.closed_at
    observed_at = _timeline(known_at[of_candidate], exceeded[of_candidate], rule)
    if rule.limit_ms is not None:
        return Stream(rule, segment, observed_at, 1.0, limit=limit)
    pool = counts & ~np.isnan(exceeded) & (of_candidate | ~traffic.is_candidate)
    matches = match_blocks(traffic, pool)
    matched = _timeline(matches.known_at, matches.differences(exceeded))
    return Stream(rule, segment, observed_at, 1.0, matched=matched, limit=limit)


def _limit(rule: MetricRule, segment: Segment, observed: Observed, inside: Mask) -> Limit | None:
    """The limit that is frozen, or of the policy, or that the incumbent's own requests of the same kind set."""
    if observed.frozen:
        return observed.frozen.limits.get((rule.name, segment))
    if rule.limit_ms is not None:
        return Limit(rule.limit_ms, rule.quantile, rule.limit_ms, 0)
    recording = observed.recording
    traffic = recording.traffic
    rows = inside & ~traffic.is_candidate & _in_modes(rule, traffic) & ~recording.failed
    return fix_limit(recording.latency_ms[rows], rule.quantile, rule.slack)


def _in_modes(rule: MetricRule, traffic: Traffic) -> Mask:
    return np.where(traffic.is_shadow, SHADOW in rule.modes, CANARY in rule.modes)


def _timeline(known_at: Floats, values: Floats, rule: MetricRule | None = None) -> Timeline:
    is_known = ~np.isnan(values)
    support = DIFFERENCE if rule is None else rule.support
    return Timeline(known_at[is_known], cells_of(values[is_known], support))


def _subset(columns: Columns, rows: Integers) -> dict[str, Column]:
    return {key: Column(column.codes[rows], column.names) for key, column in columns.items()}


def _one_number(codes: Sequence[Integers], size: int) -> Integers:
    """One number per combination of codes. [size]"""
    if not codes:
        return np.zeros(size, dtype=np.int64)
    _, number = np.unique(np.stack(codes), axis=1, return_inverse=True)
    return number.reshape(-1).astype(np.int64)


def _notices(recording: Recording, comparable: Comparable) -> list[str]:
    """What an engineer should know about what was not compared."""
    notices = []
    if comparable.num_repeats:
        notices.append(
            f"{comparable.num_repeats} requests repeat a prompt or a user's block and were not counted again."
        )
    if comparable.num_unfair:
        notices.append(
            f"{comparable.num_unfair} repeats were met by one arm alone and were left out of both."
        )
    if comparable.num_mixed:
        notices.append(
            f"{comparable.num_mixed} pairs were scored by two classifier versions and were left out."
        )
    num_dropped = int(comparable.dropped.sum())
    if num_dropped:
        coverage = coverage_of(comparable.dropped, comparable.intended)
        notices.append(
            f"{num_dropped} shadow copies were dropped before dispatch: coverage {coverage:.1%}."
        )
    first_loss = next(iter(recording.losses.values()), np.zeros(recording.traffic.at.size))
    notices += [
        f"Dropped copies are not like the rest: {i.share:.0%} of {describe(i.segment)} against {i.rest:.0%} "
        f"elsewhere ({i.key}, p={i.p_value:.1g})."
        if i.key != "incumbent_loss"
        else f"Dropped copies are not like the rest: {i.share:.0%} where the incumbent failed against {i.rest:.0%}."
        for i in find_informative_dropping(
            recording.columns, comparable.dropped, comparable.intended, first_loss
        )
    ]
    return notices
