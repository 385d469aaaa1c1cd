"""How long a verdict takes: against published medians, against simulation, and where it never comes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drift.eprocess import DIFFERENCE, RATE, Side, log_e_values
from drift.power import (
    Claim,
    forecast_differences,
    forecast_rate,
    shares_of_matches,
    shares_of_pairs,
)

LEVEL = math.log(20)


def test_no_exceedance_of_one_percent_takes_at_least_the_sample_of_wilks() -> None:
    """Wilks (1941): 299 is the least n at which all of n below a limit shows 99 % below it with confidence 95 %."""
    num = forecast_rate(1e-12, Claim(0.01, Side.BELOW, LEVEL), per_hour=1_000).num
    assert num is not None
    assert 299 <= num < 2 * 299, "anytime validity costs something, but not twice the sample"


@pytest.mark.parametrize(("discordant", "margin"), [(0.03, 0.05), (0.1, 0.05)])
def test_the_forecast_is_the_median_of_simulated_runs(discordant: float, margin: float) -> None:
    claim = Claim(margin, Side.BELOW, LEVEL)
    forecast = forecast_differences(shares_of_pairs(discordant), claim, per_hour=60).num
    assert forecast is not None
    rng = np.random.default_rng(5)
    shares = [discordant / 2, 1 - discordant, discordant / 2]
    steps = rng.multinomial(1, shares, size=(6 * forecast, 200)).cumsum(axis=0)
    counts = np.zeros((*steps.shape[:2], DIFFERENCE.num_cells), dtype=np.int64)
    counts[..., [0, 40, 80]] = steps
    looks = np.arange(0, 6 * forecast, 10)
    reached = (
        np.stack([log_e_values(counts[n], DIFFERENCE, margin, Side.BELOW) for n in looks]) >= LEVEL
    )
    first = np.where(reached.any(axis=0), looks[reached.argmax(axis=0)] + 1, np.inf)
    assert np.median(first) == pytest.approx(forecast, rel=0.25)


def test_matched_controls_take_longer_than_pairs() -> None:
    claim = Claim(0.05, Side.BELOW, LEVEL)
    paired = forecast_differences(shares_of_pairs(0.03), claim, per_hour=100)
    matched = forecast_differences(shares_of_matches(0.03, 0.0, 5), claim, per_hour=100)
    assert paired.num is not None
    assert matched.num is not None
    assert paired.num < matched.num
    assert matched.hours == pytest.approx(matched.num / 100, abs=0.11)


def test_cells_of_matches_have_the_mean_that_was_asked_for() -> None:
    shares = shares_of_matches(0.1, 0.07, 4)
    assert shares.sum() == pytest.approx(1)
    assert shares @ DIFFERENCE.middles() == pytest.approx(0.07)


def test_at_the_margin_a_verdict_never_comes() -> None:
    claim = Claim(0.05, Side.BELOW, LEVEL)
    assert forecast_differences(shares_of_pairs(0.1, 0.05), claim, per_hour=100).num is None
    assert forecast_rate(0.01, Claim(0.01, Side.ABOVE, LEVEL), per_hour=100).num is None


def test_without_traffic_there_is_a_number_and_no_hour() -> None:
    forecast = forecast_rate(0.001, Claim(0.01, Side.BELOW, LEVEL), per_hour=0)
    assert forecast.num is not None
    assert forecast.hours is None


def test_a_difference_needs_pairs_that_differ() -> None:
    with pytest.raises(ValueError, match="discordant"):
        shares_of_pairs(0.01, 0.05)


def test_rates_use_the_support_of_rates() -> None:
    assert RATE.num_cells == 3
