"""From stored requests and pairs to the counts of a rollout: each once, whatever is read twice, in any order.

Time is cut into blocks. A block is counted when every request that came in it must have ended and been stored, and never
again: in one transaction its counts are added, and the rollout's ``sealed_block`` moves past it. So a crash, a repeat or
two workers at once count nothing twice, and counts do not depend on the order in which rows were stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from django.db import transaction

from controlplane.monitoring.models import RequestLog, RequestLogQuerySet
from controlplane.rollouts.models import Rollout, SegmentCount, Step
from controlplane.rollouts.observations import Frozen, Observed, Stream, observe
from controlplane.rollouts.pair_rows import read_pair_rows
from controlplane.rollouts.pairing import GIVE_UP_AFTER_S
from controlplane.rollouts.policy import CANARY, SCORE, SHADOW, Policy
from controlplane.rollouts.recordings import record_rows
from controlplane.rollouts.requests import LOG_COLUMNS, arrived_at, row_of_log, share_at
from controlplane.rollouts.shapes import (
    counts_from_json,
    counts_to_json,
    limits_from_json,
    plan_from_json,
    segment_to_text,
)
from drift.eprocess import DIFFERENCE
from drift.segments import OVERALL, members
from inference.protocol import COPY_WAIT_S

# Beside the time that a request may take, a copy may wait for a minute, is waited for a little longer, and is then stored.
LAG_S = COPY_WAIT_S + GIVE_UP_AFTER_S + 15.0
MAX_ROWS = 50_000
# Of a quiet endpoint so many blocks are passed over at once.
MAX_BLOCKS = 4096
CHUNK = 500

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Whole time blocks, the last one exclusive."""

    first: int
    end: int
    block_s: float

    @property
    def starts_at(self) -> float:
        """Epoch seconds of the beginning."""
        return self.first * self.block_s

    @property
    def ends_at(self) -> float:
        """Epoch seconds of the end, exclusive."""
        return self.end * self.block_s


@dataclass(frozen=True, slots=True)
class Tally:
    """What a span adds to one metric on one segment."""

    metric: str
    segment: str
    values: Mapping[str, Any]


def collect(*, rollout: Rollout, policy: Policy, now: datetime) -> bool:
    """Count the blocks that are over; whether there were any. It may be called at any time, and again."""
    span = _sealable(rollout, policy, now)
    if span is None:
        return False
    log = _log_rows(rollout, policy, span)
    copies = read_pair_rows(rollout.key, _moment(span.starts_at), _moment(span.ends_at))
    frozen = Frozen(plan_from_json(rollout.plan), limits_from_json(rollout.limits))
    tallies: list[Tally] = []
    reached: dict[str, int] = {}
    for mode, rows, rules in (
        (SHADOW, [*log, *copies.shadow], _without_score(policy)),
        (SCORE, copies.score, _of_score(policy)),
    ):
        if not rows:
            continue
        observed = observe(record_rows(rows, rules, rollout.key), rules, frozen)
        tallies += [_tally(observed, stream) for stream in observed.streams]
        _count_reached(reached, observed, rollout, mode)
    return _store(rollout, span, tallies, reached, _count_arms(rollout, log))


def _sealable(rollout: Rollout, policy: Policy, now: datetime) -> Span | None:
    """The blocks to count next, so few that their rows fit into memory."""
    longest_s = rollout.endpoint.deadline_s + LAG_S
    end = int((now.timestamp() - longest_s) // policy.block_s)
    first = rollout.sealed_block
    end = min(end, first + MAX_BLOCKS)
    while end - first > 1 and _num_rows(rollout, Span(first, end, policy.block_s)) > MAX_ROWS:
        end = first + (end - first) // 2
    return Span(first, end, policy.block_s) if end > first else None


def _num_rows(rollout: Rollout, span: Span) -> int:
    return _requests(rollout, span).count()


def _requests(rollout: Rollout, span: Span) -> RequestLogQuerySet:
    """Requests that may have come in ``span``, by when they ended."""
    until = span.ends_at + rollout.endpoint.deadline_s + LAG_S
    return RequestLog.objects.of_endpoint(rollout.endpoint.name).filter(
        finished_at__gte=_moment(span.starts_at),
        finished_at__lt=_moment(until),
        arm__in=("live", "candidate"),
    )


def _log_rows(rollout: Rollout, policy: Policy, span: Span) -> list[Row]:
    """Requests of both arms that came in ``span`` while the candidate had a share; of each user the first alone."""
    candidate = rollout.candidate.name
    found = _requests(rollout, span).values_list(*LOG_COLUMNS)
    rows = [
        row
        for row in (row_of_log(values, candidate=candidate) for values in found.iterator())
        if span.starts_at <= row["ts"] < span.ends_at
        and share_at(rollout.weights, row["generation"]) > 0
    ]
    if policy.users_once_per_block:
        return rows
    known = _users_before(rollout, span, {row["user"] for row in rows if row["user"]})
    first = []
    for row in sorted(rows, key=lambda row: (row["ts"], row["request_id"])):
        if row["user"] in known:
            continue
        if row["user"]:
            known.add(row["user"])
        first.append(row)
    return first


def _users_before(rollout: Rollout, span: Span, users: set[str]) -> set[str]:
    """Which of ``users`` were met earlier in this rollout: arms are sticky, so a user speaks once."""
    if not rollout.weights:
        return set()
    earlier = RequestLog.objects.of_endpoint(rollout.endpoint.name).filter(
        finished_at__gte=rollout.created_at,
        finished_at__lt=_moment(span.starts_at + rollout.endpoint.deadline_s + LAG_S),
        arm__in=("live", "candidate"),
    )
    known: set[str] = set()
    listed = sorted(users)
    for start in range(0, len(listed), CHUNK):
        found = earlier.filter(user__in=listed[start : start + CHUNK])
        columns = found.values_list("user", "finished_at", "total_s", "generation")
        known.update(
            user
            for user, finished_at, total_s, generation in columns
            if arrived_at(finished_at, total_s) < span.starts_at
            and share_at(rollout.weights, generation) > 0
        )
    return known


def _tally(observed: Observed, stream: Stream) -> Tally:
    """The cells of a stream, and what each arm had in it."""
    rule, recording = stream.rule, observed.recording
    traffic = recording.traffic
    inside = members(stream.segment, recording.columns, observed.plan, traffic.at.size)
    values = recording.losses.get(rule.name, recording.latency_ms)
    is_known = inside & ~np.isnan(values)
    candidate, incumbent = (is_known & arm for arm in (traffic.is_candidate, ~traffic.is_candidate))
    comparable = observed.comparable
    matched = stream.matched
    return Tally(
        rule.name,
        segment_to_text(stream.segment),
        {
            "counts": np.bincount(stream.observed.cells, minlength=rule.support.num_cells),
            "matched": None
            if matched is None
            else np.bincount(matched.cells, minlength=DIFFERENCE.num_cells),
            "num_intended": int((comparable.intended & inside).sum()),
            "num_dropped": int((comparable.dropped & inside).sum()),
            "num_incumbent": int(incumbent.sum()),
            "num_candidate": int(candidate.sum()),
            "sum_incumbent": float(values[incumbent].sum()),
            "sum_candidate": float(values[candidate].sum()),
        },
    )


def _count_reached(
    reached: dict[str, int], observed: Observed, rollout: Rollout, mode: str
) -> None:
    """How much the present step has brought, by segment: pairs, or candidate requests of a canary."""
    kind = rollout_step_kind(rollout)
    if (mode == SCORE) != (kind == SCORE):
        return
    traffic, columns = observed.recording.traffic, observed.recording.columns
    since = traffic.at >= rollout.step_at.timestamp()
    if kind == CANARY:
        rows = np.flatnonzero(since & traffic.is_candidate & ~traffic.is_shadow)
    else:
        rows = observed.comparable.pairs.controls
        rows = rows[since[rows] & traffic.is_shadow[rows]]
    segments = (OVERALL,) if kind == CANARY else observed.plan.judged
    for segment in segments:
        inside = members(segment, columns, observed.plan, traffic.at.size)
        text = segment_to_text(segment)
        reached[text] = reached.get(text, 0) + int(inside[rows].sum())


def rollout_step_kind(rollout: Rollout) -> str:
    """What the step that the rollout is at does; empty before the first."""
    steps = rollout.document.get("steps", [])
    return steps[rollout.step_index]["type"] if 0 <= rollout.step_index < len(steps) else ""


def _count_arms(rollout: Rollout, log: Sequence[Row]) -> dict[str, list[int]]:
    """Users that each arm met, by the share that the candidate had; with requests of nobody known a ratio says little."""
    arms = {share: list(numbers) for share, numbers in rollout.arms.items()}
    seen: set[str] = set()
    for row in log:
        if not row["user"] or row["user"] in seen:
            continue
        seen.add(row["user"])
        share = str(share_at(rollout.weights, row["generation"]))
        numbers = arms.setdefault(share, [0, 0])
        numbers[row["arm"] == "candidate"] += 1
    return arms


@transaction.atomic
def _store(
    rollout: Rollout,
    span: Span,
    tallies: Sequence[Tally],
    reached: Mapping[str, int],
    arms: Mapping[str, Any],
) -> bool:
    """Add everything and move past the span, unless somebody else has."""
    values: dict[str, Any] = {"sealed_block": span.end, "arms": arms}
    if not tallies and arms == rollout.arms and rollout.looked_block == span.first:
        values["looked_block"] = span.end  # nothing is new, so there is nothing to look at
    if not Rollout.objects.filter(pk=rollout.pk, sealed_block=span.first).update(**values):
        return False
    for tally in tallies:
        _add(rollout, tally)
    step = Step.objects.filter(rollout=rollout, index=rollout.step_index).first()
    if step is not None and reached:
        step.counts = dict(Counter(step.counts) + Counter(reached))
        step.save(update_fields=["counts"])
    return True


def _add(rollout: Rollout, tally: Tally) -> None:
    row, _ = SegmentCount.objects.get_or_create(
        rollout=rollout, metric=tally.metric, segment=tally.segment
    )
    for name, value in tally.values.items():
        if name in ("counts", "matched"):
            if value is not None:
                stored = counts_from_json(getattr(row, name) or {}, value.size)
                setattr(row, name, counts_to_json(stored + value))
        else:
            setattr(row, name, getattr(row, name) + value)
    row.save()


def _without_score(policy: Policy) -> Policy:
    return replace(
        policy, metrics=tuple(r for r in policy.metrics if set(r.modes) & {SHADOW, CANARY})
    )


def _of_score(policy: Policy) -> Policy:
    """The gates of the cheap shadow, whose pairs are compared as those of a shadow are."""
    rules = (rule for rule in policy.metrics if SCORE in rule.modes)
    return replace(policy, metrics=tuple(replace(rule, modes=(SHADOW,)) for rule in rules))


def _moment(epoch_s: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=epoch_s)
