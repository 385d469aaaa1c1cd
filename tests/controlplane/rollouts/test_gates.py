"""From counts to verdicts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from controlplane.rollouts.gates import (
    Board,
    Decision,
    Judgement,
    Memory,
    budget_shares,
    judge,
    look,
)
from controlplane.rollouts.policy import MetricRule, Policy, default_policy, parse_policy
from drift.eprocess import DIFFERENCE, RATE, Counts, spending_weight
from drift.segments import OVERALL, Segment
from drift.verdict import Verdict

POLICY = parse_policy({"discovery": None})
FLAGS, TAIL = POLICY.metrics
REFUND: Segment = (("topic", "refund"),)
SEARCH: Segment = (("topic", "search"),)


def differences(better: int, same: int, worse: int) -> Counts:
    counts = np.zeros(DIFFERENCE.num_cells, dtype=np.int64)
    counts[[0, 40, 80]] = better, same, worse
    return counts


def rates(kept: int, exceeded: int) -> Counts:
    counts = np.zeros(RATE.num_cells, dtype=np.int64)
    counts[[0, 2]] = kept, exceeded
    return counts


def board(rows: dict[Segment, Counts], rule: MetricRule = FLAGS, coverage: float = 1.0) -> Board:
    return Board(
        rule=rule,
        segments=tuple(rows),
        numbers=(0,) * len(rows),
        counts=np.stack(list(rows.values())),
        coverage=np.full(len(rows), coverage),
    )


def judge_once(*boards: Board, policy: Policy = POLICY) -> Judgement:
    return judge(boards, look(boards, Memory(), policy), policy)


GOOD = {OVERALL: differences(40, 4_920, 40), REFUND: differences(4, 392, 4)}


def test_good_on_every_segment_is_promoted() -> None:
    judgement = judge_once(board(GOOD))
    assert (judgement.decision, judgement.verdict) == (Decision.PROMOTE, Verdict.PASS)
    for result in judgement.results:
        assert result.bounds is not None
        assert result.bounds.lower <= result.bounds.estimate <= result.bounds.upper <= result.margin


def test_one_segment_that_is_undecided_holds_the_promotion() -> None:
    judgement = judge_once(board({**GOOD, SEARCH: differences(6, 100, 6)}))
    assert judgement.decision is Decision.INCONCLUSIVE
    undecided = judgement.results[2]
    assert undecided.verdict is Verdict.INCONCLUSIVE
    assert undecided.num_needed is not None
    assert undecided.num_needed > 0
    assert "more are needed" in undecided.sentence


def test_one_bad_segment_rolls_back_and_is_named() -> None:
    judgement = judge_once(board({**GOOD, SEARCH: differences(4, 290, 60)}))
    assert (judgement.decision, judgement.verdict) == (Decision.ROLLBACK, Verdict.FAIL)
    assert [r.segment for r in judgement.results if r.verdict is Verdict.FAIL] == [SEARCH]
    assert judgement.reason.startswith("flag_rate on topic=search: +15.8 points")


def test_what_was_shown_once_stays_shown() -> None:
    bad = board({OVERALL: differences(0, 200, 60)})
    later = board({OVERALL: differences(60, 2_000, 140)})
    memory = look([later], look([bad], Memory(), POLICY), POLICY)
    judgement = judge([later], memory, POLICY)
    assert judgement.decision is Decision.ROLLBACK
    bounds = judgement.results[0].bounds
    assert bounds is not None
    assert FLAGS.tolerance <= bounds.lower <= bounds.estimate


def test_data_that_turn_round_do_not_turn_the_interval_inside_out() -> None:
    bad = board({OVERALL: differences(0, 200, 60)})
    later = board({OVERALL: differences(100, 2_000, 100)})
    memory = look([later], look([bad], Memory(), POLICY), POLICY)
    bounds = judge([later], memory, POLICY).results[0].bounds
    assert bounds is not None
    assert bounds.lower <= bounds.estimate <= bounds.upper


def test_looking_again_changes_nothing() -> None:
    boards = [board({**GOOD, SEARCH: differences(4, 290, 60)})]
    once = look(boards, Memory(), POLICY)
    assert look(boards, once, POLICY) == once


def test_below_the_minimum_there_is_no_number() -> None:
    result = judge_once(board({OVERALL: differences(0, 98, 1)})).results[0]
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.bounds is None
    assert result.evidence is None
    assert "n too small: 99 of the 100" in result.sentence
    assert result.num_needed == 1


def test_what_fails_every_time_needs_no_minimum() -> None:
    judgement = judge_once(board({OVERALL: differences(0, 0, 40)}))
    assert judgement.decision is Decision.ROLLBACK


def test_low_coverage_is_no_pass() -> None:
    judgement = judge_once(board(GOOD, coverage=0.4))
    assert judgement.decision is Decision.INCONCLUSIVE
    assert "only 40% of the intended comparisons" in judgement.results[0].sentence


def test_a_metric_that_was_not_measured_is_an_error_and_no_pass() -> None:
    missing = replace(board({OVERALL: rates(0, 0)}, TAIL), missing="no latency.")
    judgement = judge_once(board(GOOD), missing)
    assert (judgement.decision, judgement.verdict) == (Decision.INCONCLUSIVE, Verdict.ERROR)
    assert "no latency" in judgement.reason


def test_nothing_at_all_is_inconclusive() -> None:
    judgement = judge_once()
    assert (judgement.decision, judgement.verdict) == (Decision.INCONCLUSIVE, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        (rates(2_995, 5), Verdict.PASS),
        (rates(2_900, 100), Verdict.FAIL),
        (rates(2_970, 30), Verdict.INCONCLUSIVE),
        (rates(118, 2), Verdict.INCONCLUSIVE),
    ],
)
def test_the_tail_is_a_rate_against_one_percent(counts: Counts, verdict: Verdict) -> None:
    assert judge_once(board({OVERALL: counts}, TAIL)).results[0].verdict is verdict


def test_a_rush_that_slows_both_arms_is_no_failure() -> None:
    slow = board({OVERALL: rates(2_900, 100)}, TAIL)
    alike = replace(slow, matched=differences(100, 2_800, 100)[None])
    assert judge_once(alike).decision is Decision.INCONCLUSIVE
    worse = replace(slow, matched=differences(10, 2_890, 100)[None])
    assert judge_once(worse).decision is Decision.ROLLBACK


def test_shares_of_the_budget_add_up_to_one_at_most() -> None:
    discovered = replace(board({**GOOD, SEARCH: differences(0, 1, 0)}), numbers=(0, 0, 1))
    shares = budget_shares([discovered, board({OVERALL: rates(1, 0)}, TAIL)], default_policy())
    assert shares["p99_latency", OVERALL] == 0.25
    assert shares["flag_rate", REFUND] == 0.125
    assert shares["flag_rate", SEARCH] == pytest.approx(spending_weight(1) / 2)
    assert sum(shares.values()) <= 1


def test_evidence_carries_its_threshold() -> None:
    result = judge_once(board(GOOD)).results[1]
    assert result.evidence is not None
    assert result.evidence.log_safe_threshold == pytest.approx(math.log(20))
    assert result.evidence.log_harm_threshold == pytest.approx(math.log(20 * 2))
    assert result.evidence.log_safe > result.evidence.log_safe_threshold
