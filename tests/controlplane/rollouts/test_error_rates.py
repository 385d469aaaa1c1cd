"""How often verdicts are wrong: the quick set of what `make bench-verdicts` measures, with fixed seeds.

A rate over n runs is known up to two standard errors, 2 sqrt(.05 x .95 / n) = 3 points at 200 runs and 2 at 400; the
processes stay so far below 5 % that bounds are asserted as they are.
"""

from __future__ import annotations

import numpy as np
import pytest

from controlplane.rollouts.gates import Board, Decision, Memory, judge, look
from controlplane.rollouts.policy import default_policy
from drift.eprocess import DIFFERENCE, Side, log_e_values
from drift.verdict import Verdict
from tests import scenarios
from tests.bench import verdicts
from tests.simulations import (
    BETTER_SAME_WORSE,
    Pairs,
    alarm_rate,
    msprt_looks,
    policy_of,
    promotion_looks,
    rollback_looks,
    z_looks,
    z_promotion_looks,
)

pytestmark = pytest.mark.slow


def test_equal_versions_are_rarely_thrown_out_by_400_looks_at_20_segments() -> None:
    pairs = verdicts.equal_pairs(200, seed=1)
    assert alarm_rate(rollback_looks(pairs, 0.0)) <= 0.05
    assert alarm_rate(z_looks(pairs, verdicts.Z)) > 0.9, (
        "the data must be able to fool a simple test"
    )


def test_a_candidate_at_the_margin_is_rarely_promoted() -> None:
    pairs = verdicts.one_segment_at_the_margin(400, seed=2)
    assert alarm_rate(promotion_looks(pairs, 0.05)) <= 0.05
    assert alarm_rate(z_promotion_looks(pairs, 0.05)) > 0.3


def test_a_bad_segment_is_found_about_when_msprt_finds_it() -> None:
    pairs = verdicts.pairs_with_a_bad_segment(100, seed=3, harm=0.10)
    ours, theirs = rollback_looks(pairs, 0.0), msprt_looks(pairs, 400.0)
    assert alarm_rate(ours) > 0.95
    assert np.median(ours) == pytest.approx(np.median(theirs), rel=0.25)


def test_the_vectorised_simulation_decides_as_the_gates_do() -> None:
    pairs = verdicts.pairs_with_a_bad_segment(4, seed=4, harm=0.15)
    policy = policy_of(
        metrics={"flag_rate": {"kind": "flags", "overall_margin": 0.05}}, discovery=None
    )
    segments = tuple((("topic", f"t{n:02}"),) for n in range(verdicts.NUM_SEGMENTS))
    expected = rollback_looks(pairs, 0.02)
    for run in range(4):
        memory = Memory()
        decided = 0
        for at in range(verdicts.NUM_LOOKS):
            board = Board(
                rule=policy.metrics[0],
                segments=segments,
                numbers=(0,) * len(segments),
                counts=counts_of(pairs, at, run),
                coverage=np.ones(len(segments)),
            )
            memory = look([board], memory, policy)
            if not decided and memory.rollback >= np.log(20):
                decided = at + 1
                judgement = judge([board], memory, policy)
                assert judgement.decision is Decision.ROLLBACK
        assert decided == expected[run]


def counts_of(pairs: Pairs, at: int, run: int) -> np.ndarray:
    counts = np.zeros((verdicts.NUM_SEGMENTS, DIFFERENCE.num_cells), dtype=np.int64)
    num, worse, better = (part[at, run] for part in (pairs.num, pairs.worse, pairs.better))
    cells = [20 * cell for cell in BETTER_SAME_WORSE]
    counts[:, cells] = np.stack([better, num - worse - better, worse], axis=1)
    return counts


@pytest.mark.parametrize("name", scenarios.CASES)
def test_equal_versions_that_look_unequal_are_not_thrown_out(name: str) -> None:
    assert verdicts.rollback_rate(scenarios.CASES[name], verdicts.STRICT, 25, seed=5) <= 0.05


def test_a_candidate_that_fails_slowly_is_not_promoted_before_its_failures_arrive() -> None:
    rate = verdicts.promotion_rate(scenarios.slow_failures, verdicts.AT_THE_MARGIN, 60, seed=12)
    assert rate <= 0.05


def test_a_hidden_two_way_slice_is_found_by_discovery_and_crossings_and_not_by_singles() -> None:
    found = {
        name: [
            verdicts.names(replayed, scenarios.HIDDEN)
            for replayed in verdicts.judge_runs(scenarios.hidden_slice, policy, 4, seed=6)
        ]
        for name, policy in (
            ("singles", verdicts.WITHOUT_DISCOVERY),
            ("crossed", verdicts.CROSSED),
            ("discovery", default_policy()),
        )
    }
    assert sum(found["singles"]) == 0
    assert sum(found["crossed"]) >= 3
    assert sum(found["discovery"]) >= 3


def test_a_slice_of_equal_versions_is_rarely_discovered_as_bad() -> None:
    runs = verdicts.judge_runs(
        lambda rng: scenarios.hidden_slice(rng, 8_000, 0.0), verdicts.STRICT, 20, 7
    )
    assert sum(verdicts.fails_a_discovered_slice(replayed) for replayed in runs) <= 1


def test_a_tail_four_times_slower_fails_whatever_the_mean() -> None:
    runs = verdicts.judge_runs(scenarios.slow_tail, default_policy(), 10, seed=8)
    found = [verdicts.verdict_on_the_tail(replayed) for replayed in runs]
    assert found.count(Verdict.FAIL) >= 9


def test_with_120_requests_nothing_is_said_of_the_tail() -> None:
    runs = verdicts.judge_runs(scenarios.few_requests, default_policy(), 10, seed=9)
    assert {verdicts.verdict_on_the_tail(replayed) for replayed in runs} == {Verdict.INCONCLUSIVE}


def test_at_exactly_one_percent_the_tail_rarely_passes() -> None:
    assert alarm_rate(verdicts.exceedance_looks(400, 10, 0.01, Side.BELOW)) <= 0.05


def test_the_grid_of_the_simulation_is_that_of_the_gates() -> None:
    pairs = verdicts.equal_pairs(2, seed=11)
    ours = log_e_values(counts_of(pairs, 100, 1), DIFFERENCE, 0.02, Side.ABOVE)
    cells = [20 * cell for cell in BETTER_SAME_WORSE]
    assert DIFFERENCE.middles()[cells].tolist() == [-1.0, 0.0, 1.0]
    assert np.isfinite(ours).all()
