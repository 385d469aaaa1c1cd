"""Betting e-processes: examples by hand, error rates under peeking, degenerate input; test_oracle.py has the other implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drift.eprocess import (
    BETS,
    DIFFERENCE,
    RATE,
    Counts,
    Floats,
    Side,
    Support,
    cells_of,
    confidence_sequence,
    count,
    e_bh,
    log_e_values,
    num_until,
    spending_weight,
)

differences = st.lists(st.sampled_from([-1.0, -0.5, -0.2, 0.0, 0.25, 0.6, 1.0]), max_size=60)
sides = st.sampled_from(list(Side))


def capital_by_hand(observations: list[float], null_mean: float, side: Side) -> float:
    """The definition, one observation after the other, in plain floats."""
    room = null_mean + 1 if side is Side.ABOVE else 1 - null_mean
    capitals = []
    for fraction in BETS.tolist():
        capital = 1.0
        for observation in observations:
            capital *= 1 + side.value * fraction / room * (observation - null_mean)
        capitals.append(capital)
    return sum(capitals) / len(capitals)


def draws(rate: float, size: int, seed: int) -> Floats:
    return (np.random.default_rng(seed).random(size) < rate).astype(np.float64)


@given(differences, st.sampled_from([-0.3, 0.0, 0.02, 0.05]), sides)
def test_counts_give_what_betting_one_by_one_gives(
    observations: list[float], null_mean: float, side: Side
) -> None:
    counts = count(observations, DIFFERENCE)
    log_e = float(log_e_values(counts, DIFFERENCE, null_mean, side))
    assert math.exp(log_e) == pytest.approx(
        capital_by_hand(observations, null_mean, side), rel=1e-9
    )


@given(differences, st.randoms(use_true_random=False), st.integers(1, 5))
def test_any_order_and_any_split_give_the_same_bytes(
    observations: list[float], random: object, num_processes: int
) -> None:
    shuffled = list(observations)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    merged: Counts = np.zeros(DIFFERENCE.num_cells, dtype=np.int64)
    for process in range(num_processes):
        merged = merged + count(shuffled[process::num_processes], DIFFERENCE)
    whole = count(observations, DIFFERENCE)
    one, other = (log_e_values(c, DIFFERENCE, 0.02, Side.ABOVE).tobytes() for c in (whole, merged))
    assert one == other


def test_e_bh_on_an_example_done_by_hand() -> None:
    # 1 x 40 / 4 = 10 and 2 x 30 / 4 = 15 reach 1 / 0.1, 3 x 1 / 4 does not.
    assert e_bh(np.log([1.0, 40.0, 0.5, 30.0]), 0.1).tolist() == [False, True, False, True]


def test_all_spending_adds_up_to_one() -> None:
    # The Basel sum; what is left after n terms lies between 6 / (pi^2 (n + 1)) and 6 / (pi^2 n).
    spent = sum(spending_weight(number) for number in range(1, 10_001))
    assert 1 - spent == pytest.approx(6 / (math.pi**2 * 10_000), rel=1e-3)


def test_a_null_is_rejected_at_most_as_often_as_promised_however_often_one_looks() -> None:
    rng = np.random.default_rng(3)
    num_runs, num_looks = 2_000, 300
    steps = rng.multinomial(20, [0.1, 0.8, 0.1], size=(num_looks, num_runs)).cumsum(axis=0)
    paired = Support(-1.0, 1.0, 2)
    has_rejected = np.zeros(num_runs, dtype=np.bool_)
    for look in range(num_looks):
        counts = np.zeros((num_runs, paired.num_cells), dtype=np.int64)
        counts[:, ::2] = steps[look]
        has_rejected |= log_e_values(counts, paired, 0.0, Side.ABOVE) >= math.log(20)
    # Two standard errors of a rate of 5 % over 2,000 runs are one point; the process is below its bound.
    assert has_rejected.mean() <= 0.05
    assert has_rejected.mean() > 0.005, "a test that never rejects would prove nothing"


def test_the_confidence_sequence_covers_at_all_looks_together() -> None:
    rng = np.random.default_rng(4)
    hits = rng.binomial(50, 0.1, size=(20, 400)).cumsum(axis=0)
    has_missed = np.zeros(400, dtype=np.bool_)
    for look in range(20):
        counts = np.zeros((400, RATE.num_cells), dtype=np.int64)
        counts[:, 2] = hits[look]
        counts[:, 0] = 50 * (look + 1) - hits[look]
        lower, upper = confidence_sequence(counts, RATE, 0.05)
        has_missed |= (lower > 0.1) | (upper < 0.1)
    assert has_missed.mean() <= 0.05


def test_a_bound_ends_where_evidence_ends() -> None:
    counts = count(draws(0.2, 500, seed=5) - draws(0.1, 500, seed=6), DIFFERENCE)
    lower, upper = (float(bound) for bound in confidence_sequence(counts, DIFFERENCE, 0.1))
    assert log_e_values(counts, DIFFERENCE, lower, Side.ABOVE) >= math.log(20)
    assert log_e_values(counts, DIFFERENCE, lower + 1e-6, Side.ABOVE) < math.log(20)
    assert log_e_values(counts, DIFFERENCE, upper, Side.BELOW) >= math.log(20)


@pytest.mark.parametrize("side", Side)
def test_nothing_observed_is_no_evidence_and_no_bound(side: Side) -> None:
    nothing = count([], DIFFERENCE)
    assert float(log_e_values(nothing, DIFFERENCE, 0.0, side)) == pytest.approx(0.0, abs=1e-12)
    lower, upper = confidence_sequence(nothing, DIFFERENCE, 0.05)
    assert (float(lower), float(upper)) == (-1.0, 1.0)
    assert num_until(nothing, DIFFERENCE, 0.02, side, 3.0) is None


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_a_billion_equal_observations_overflow_nothing(value: float) -> None:
    counts = count([value], DIFFERENCE) * 1_000_000_000
    for side in Side:
        assert np.isfinite(log_e_values(counts, DIFFERENCE, 0.02, side))
    lower, upper = confidence_sequence(counts, DIFFERENCE, 0.05)
    assert float(lower) <= value <= float(upper)
    assert float(upper) - float(lower) < 0.01


@pytest.mark.parametrize("wrong", [[1.5], [-1.01], [math.nan], [math.inf]])
def test_what_is_no_observation_is_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        count(wrong, DIFFERENCE)


def test_a_null_at_the_end_of_the_support_is_refused() -> None:
    with pytest.raises(ValueError, match="null mean"):
        log_e_values(count([0.0], RATE), RATE, 0.0, Side.ABOVE)


def test_between_grid_points_an_observation_is_rounded_against_the_claim() -> None:
    cell = int(cells_of([0.37], DIFFERENCE)[0])
    assert DIFFERENCE.values(Side.ABOVE)[cell] == pytest.approx(0.35)
    assert DIFFERENCE.values(Side.BELOW)[cell] == pytest.approx(0.40)
    on_grid = int(cells_of([0.35], DIFFERENCE)[0])
    assert DIFFERENCE.values(Side.ABOVE)[on_grid] == DIFFERENCE.values(Side.BELOW)[on_grid]


def test_what_is_still_needed_brings_the_evidence_there() -> None:
    counts = count([1.0] * 12 + [-1.0] * 4 + [0.0] * 84, DIFFERENCE)
    needed = num_until(counts, DIFFERENCE, 0.02, Side.ABOVE, math.log(400))
    assert needed is not None
    grown = counts * (100 + needed) // 100
    assert log_e_values(grown, DIFFERENCE, 0.02, Side.ABOVE) == pytest.approx(
        math.log(400), abs=0.5
    )
