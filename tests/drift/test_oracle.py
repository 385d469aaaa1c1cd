"""Betting e-processes against the package `ville`, which its author wrote with other bets and no knowledge of ours."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drift.eprocess import (
    RATE,
    Floats,
    Side,
    confidence_sequence,
    count,
    e_bh,
    log_average,
    log_e_values,
)

ville = pytest.importorskip("ville", reason="the oracle is a test dependency")


def draws(rate: float, size: int, seed: int) -> Floats:
    return (np.random.default_rng(seed).random(size) < rate).astype(np.float64)


def test_the_interval_agrees_with_an_independent_implementation() -> None:
    observations = draws(0.105, 2_000, seed=1)
    bounds = confidence_sequence(count(observations, RATE), RATE, 0.05)
    ours = [float(bound) for bound in bounds]
    exact = ville.BernoulliCS(alpha=0.05).fit(observations).interval()
    betting = ville.BettingCS(alpha=0.05).fit(observations).interval()
    # Other bets on the same draws: a tenth of the width apart at most, and no wider than adaptive bets.
    assert ours == pytest.approx(exact, abs=(exact[1] - exact[0]) / 10)
    assert ours[1] - ours[0] <= betting[1] - betting[0]


@pytest.mark.parametrize(("rate", "side"), [(0.05, Side.BELOW), (0.16, Side.ABOVE)])
def test_evidence_comes_when_an_independent_implementation_has_it(rate: float, side: Side) -> None:
    alternative = "greater" if side is Side.ABOVE else "less"
    ours, theirs = [], []
    for seed in range(20):
        observations = draws(rate, 3_000, seed)
        cumulative = np.cumsum(observations)
        counts = np.zeros((observations.size, RATE.num_cells), dtype=np.int64)
        counts[:, 2] = cumulative
        counts[:, 0] = np.arange(1, observations.size + 1) - cumulative
        log_e = log_e_values(counts, RATE, 0.1, side)
        ours.append(int(np.argmax(log_e >= math.log(20))) + 1)
        theirs.append(
            ville.BettingTest(0.1, alternative=alternative).fit(observations).stopping_time(0.05)
        )
    assert 0.5 < np.median(ours) / np.median(theirs) < 1.5


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30), st.floats(0.01, 0.3))
def test_e_bh_rejects_what_an_independent_implementation_rejects(
    e_values: list[float], alpha: float
) -> None:
    theirs = ville.evalues.ebh(e_values, alpha)
    assert e_bh(np.log(e_values), alpha).tolist() == theirs.tolist()


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30))
def test_the_average_is_that_of_an_independent_implementation(e_values: list[float]) -> None:
    assert math.exp(log_average(np.log(e_values))) == pytest.approx(
        float(ville.evalues.combine(e_values)), rel=1e-9
    )
