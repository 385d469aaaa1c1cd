"""The sample-ratio test: a value by hand, its error rate under constant looking, and nothing at all."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drift.ratio import ALPHA, Arms, expected_candidates, log_e_of_imbalance


def test_no_units_are_no_evidence() -> None:
    assert log_e_of_imbalance([]) == 0.0
    assert log_e_of_imbalance([Arms(0.1, 0, 0)]) == 0.0
    assert log_e_of_imbalance([Arms(1.0, 0, 90), Arms(0.0, 90, 0)]) == 0.0


def test_one_unit_is_the_ratio_of_its_chances() -> None:
    """With a prior centred on the share, the first unit is as likely as under the null: its factor is one."""
    assert log_e_of_imbalance([Arms(0.3, 0, 1)]) == pytest.approx(0.0, abs=1e-9)
    assert log_e_of_imbalance([Arms(0.3, 1, 0)]) == pytest.approx(0.0, abs=1e-9)


def test_two_units_by_hand() -> None:
    """Beta(60, 140): the second is a candidate, given that the first was, with 61 / 201; under the null with 0.3."""
    assert log_e_of_imbalance([Arms(0.3, 0, 2)]) == pytest.approx(math.log(61 / 201 / 0.3))


def test_periods_with_other_shares_multiply() -> None:
    one, other = Arms(0.1, 800, 150), Arms(0.3, 650, 350)
    both = log_e_of_imbalance([one, other])
    assert both == pytest.approx(log_e_of_imbalance([one]) + log_e_of_imbalance([other]))
    assert expected_candidates([one, other]) == pytest.approx(95 + 300)


def test_a_fair_split_that_is_looked_at_all_the_time_is_seldom_called_unfair() -> None:
    rng = np.random.default_rng(11)
    num_alarms = 0
    for _ in range(400):
        arms = np.cumsum(rng.random(2_000) < 0.1)
        looks = (Arms(0.1, n - int(arms[n - 1]), int(arms[n - 1])) for n in range(20, 2_001, 20))
        num_alarms += any(log_e_of_imbalance([look]) >= -math.log(0.05) for look in looks)
    # At level 0.05 at most 20 of 400 in the mean; 33 are three deviations more.
    assert num_alarms <= 33


def test_a_candidate_that_gets_half_of_its_share_is_noticed() -> None:
    assert log_e_of_imbalance([Arms(0.1, 1_900, 100)]) >= -math.log(ALPHA)
    assert log_e_of_imbalance([Arms(0.1, 1_800, 200)]) < 0
