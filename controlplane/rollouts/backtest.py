"""Recorded traffic through the same matching, segments and gates as live traffic, without a database."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controlplane.rollouts.gates import Board, Judgement, Memory, judge, look
from controlplane.rollouts.observations import (
    Observed,
    Stream,
    board_of,
    discovery_rule,
    look_times,
    missing_board,
    observe,
    past_differences,
    propose_segment,
    stream_of,
)
from controlplane.rollouts.policy import MetricRule, Policy
from controlplane.rollouts.recordings import MalformedRow, read_rows, record_rows
from drift.eprocess import DIFFERENCE
from drift.segments import Segment, describe
from drift.verdict import Result, Verdict

EXPERIMENT = "backtest"
# The words of the report; a metric that was not measured is no pass, and its sentence says why.
WORDS = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "fail",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.ERROR: "inconclusive",
}
LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the last look saw and says, and when a rollback was first due."""

    judgement: Judgement
    boards: tuple[Board, ...]
    rollback_at: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a backtest."""

    replayed: Replayed
    num_rows: int
    malformed: tuple[MalformedRow, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object; equal recordings give equal bytes."""
        judgement = self.replayed.judgement
        return {
            "verdict": str(judgement.decision),
            "overall": str(judgement.verdict),
            "reason": judgement.reason,
            "segments": [
                _result_to_json(result, board, row) for result, board, row in self._results()
            ],
            "alarms": [],
            "e_rollback": _e_value(judgement.log_e_rollback),
            "e_rollback_threshold": _e_value(judgement.log_threshold),
            "rollback_at": self.replayed.rollback_at,
            "not_covered": [
                {"segment": dict(missed.segment), "n": missed.n} for missed in judgement.not_covered
            ],
            "notices": list(judgement.notices),
            "rows": self.num_rows,
            "malformed": [{"line": error.line, "error": error.told} for error in self.malformed],
        }

    def to_text(self) -> str:
        """The same as a table, and the sentences."""
        judgement = self.replayed.judgement
        head = (
            "segment",
            "metric",
            "verdict",
            "n",
            "estimate",
            "lower",
            "upper",
            "margin",
            "needed",
        )
        lines = [
            f"{str(judgement.decision).upper()} ({judgement.verdict}): {judgement.reason}",
            "",
            *_aligned([head, *(_table_row(result) for result in judgement.results)]),
        ]
        lines += (
            ["", *(f"note: {notice}" for notice in judgement.notices)] if judgement.notices else []
        )
        if judgement.not_covered:
            missed = ", ".join(f"{describe(m.segment)} (n={m.n})" for m in judgement.not_covered)
            lines += ["", f"not covered, too small to be judged alone: {missed}"]
        lines += [f"malformed: {error.message}" for error in self.malformed]
        return "\n".join(lines)

    def _results(self) -> Iterable[tuple[Result, Board, int]]:
        places = [
            (board, row) for board in self.replayed.boards for row in range(len(board.segments))
        ]
        for result, (board, row) in zip(self.replayed.judgement.results, places, strict=True):
            yield result, board, row


def run(lines: Iterable[str], policy: Policy, *, is_strict: bool = False) -> Report:
    """Judge the recorded traffic in ``lines``.

    Raises:
        MalformedRow: a line is malformed, and ``is_strict``; else it is skipped and told in the report.
    """
    read = read_rows(lines, is_strict=is_strict)
    observed = observe(record_rows(read.rows, policy, EXPERIMENT), policy)
    num_golden = sum(row["mode"] == "golden" for row in read.rows)
    notices = (
        [f"{num_golden} golden rows were not judged: they measure drift."] if num_golden else []
    )
    return Report(replay(observed, notices), len(read.rows), read.malformed)


def replay(observed: Observed, notices: Sequence[str] = ()) -> Replayed:
    """Look whenever live would have looked; what was shown once stays shown."""
    policy = observed.policy
    tallies = [
        _Tally(rule, [stream for stream in observed.streams if stream.rule == rule])
        for rule in policy.metrics
    ]
    tallies = [tally for tally in tallies if tally.streams]
    absent = [missing_board(missing) for missing in observed.missing]
    explorer = _Explorer(observed)
    memory, rollback_at, before = Memory(), None, -math.inf
    boards = [*(tally.board() for tally in tallies), *absent]
    for at in look_times(observed).tolist():
        for tally in tallies:
            tally.advance(before, at)
        boards = [*(tally.board() for tally in tallies), *absent]
        memory = look(boards, memory, policy)
        if rollback_at is None and memory.rollback >= -math.log(policy.alpha):
            rollback_at = at
        found = explorer.explore(at)
        for tally in tallies:
            if found is not None and found.rule == tally.rule:
                tally.add(found)
        before = at
    boards = [*(tally.board() for tally in tallies), *absent]
    judgement = judge(
        boards,
        memory,
        policy,
        not_covered=observed.plan.not_covered,
        notices=[*observed.notices, *notices],
    )
    return Replayed(judgement, tuple(boards), rollback_at)


class _Tally:
    """The running counts of one metric."""

    def __init__(self, rule: MetricRule, streams: Sequence[Stream]) -> None:
        self.rule = rule
        self.streams = list(streams)
        self.counts = np.zeros((len(streams), rule.support.num_cells), dtype=np.int64)
        is_matched = any(stream.matched is not None for stream in streams)
        size = (len(streams), DIFFERENCE.num_cells)
        self.matched = np.zeros(size, dtype=np.int64) if is_matched else None

    def add(self, stream: Stream) -> None:
        """Count a discovered segment from now on."""
        self.streams.append(stream)
        self.counts = np.vstack([self.counts, np.zeros_like(self.counts[:1])])

    def advance(self, after: float, until: float) -> None:
        """Count what became known between two looks."""
        for row, stream in enumerate(self.streams):
            self.counts[row] += stream.observed.counts(self.rule.support.num_cells, after, until)
            if self.matched is not None and stream.matched is not None:
                self.matched[row] += stream.matched.counts(DIFFERENCE.num_cells, after, until)

    def board(self) -> Board:
        return board_of(self.rule, self.streams, self.counts, self.matched)


class _Explorer:
    """Proposes a slice after every so many observations."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.rule = discovery_rule(observed.policy)
        is_measured = any(stream.rule == self.rule for stream in observed.streams)
        if not is_measured:
            self.rule = None
        if self.rule is not None:
            self.past = past_differences(observed, self.rule)
        self.known: frozenset[Segment] = frozenset(observed.plan.judged)
        self.num_found = 0
        self.num_seen = 0

    def explore(self, at: float) -> Stream | None:
        """The stream of a slice proposed by what was known ``at`` this moment, made of what comes later."""
        discovery = self.observed.policy.discovery
        if self.rule is None or discovery is None:
            return None
        num_known = int(np.searchsorted(self.past[0].known_at, at, side="right"))
        if num_known - self.num_seen < discovery.every:
            return None
        self.num_seen = num_known
        segment = propose_segment(self.observed, self.rule, self.past, at, self.known)
        if segment is None:
            return None
        self.known |= {segment}
        self.num_found += 1
        return stream_of(self.observed, self.rule, segment, after=at, number=self.num_found)


def _result_to_json(result: Result, board: Board, row: int) -> dict[str, Any]:
    bounds, evidence = result.bounds, result.evidence
    return {
        "segment": dict(result.segment),
        "metric": result.metric,
        "verdict": WORDS[result.verdict],
        "n": result.n,
        "estimate": _rounded(bounds.estimate) if bounds else None,
        "lower": _rounded(bounds.lower) if bounds else None,
        "upper": _rounded(bounds.upper) if bounds else None,
        "tolerance": result.tolerance,
        "margin": result.margin,
        "e_harm": _e_value(evidence.log_harm) if evidence else None,
        "e_safe": _e_value(evidence.log_safe) if evidence else None,
        "needed": result.num_needed,
        "coverage": _rounded(float(board.coverage[row])),
        "limit_ms": _limit(board, row),
        "is_discovered": result.number > 0,
        "sentence": result.sentence,
    }


def _limit(board: Board, row: int) -> float | None:
    limit = board.limits_ms[row] if board.limits_ms else None
    return None if limit is None else _rounded(limit)


def _rounded(value: float) -> float:
    """Six significant digits: what the last bits of a sum are is nobody's business."""
    return float(f"{value:.6g}")


def _e_value(log_e: float) -> float:
    return _rounded(min(math.exp(min(log_e, 690.0)), LARGEST))


def _table_row(result: Result) -> tuple[str, ...]:
    bounds = result.bounds
    numbers = (
        ("-", "-", "-")
        if bounds is None
        else tuple(f"{x:+.4f}" for x in (bounds.estimate, bounds.lower, bounds.upper))
    )
    name = describe(result.segment) + (" (discovered)" if result.number else "")
    needed = "-" if result.num_needed is None else f"{result.num_needed:,}"
    return (
        name,
        result.metric,
        str(result.verdict),
        f"{result.n:,}",
        *numbers,
        f"{result.margin:+.4f}",
        needed,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Texts to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def dump(document: Mapping[str, Any]) -> str:
    """JSON in one line, in a fixed order of keys."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)
