"""How long a verdict will take: expected observations, and hours of traffic, before anyone starts a rollout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from drift.eprocess import DIFFERENCE, RATE, Side, cells_of, expected_num

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Claim:
    """What is to be shown: that the mean lies beyond ``null_mean`` on ``side``, at ``log_threshold``."""

    null_mean: float
    side: Side
    log_threshold: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one claim is expected to take on one segment; ``num`` is none where it would never be shown."""

    num: int | None
    hours: float | None


def shares_of_pairs(discordant: float, difference: float = 0.0) -> Floats:
    """Cells of paired losses that differ in a share ``discordant``, by ``difference`` in the mean. [num_cells]"""
    if not abs(difference) <= discordant <= 1:
        raise ValueError(
            f"A mean difference of {difference} needs discordant pairs between {abs(difference)} and 1, not {discordant}."
        )
    worse, better = (discordant + difference) / 2, (discordant - difference) / 2
    return _spread({-1.0: better, 0.0: 1 - discordant, 1.0: worse})


def shares_of_matches(loss_rate: float, difference: float, num_controls: int) -> Floats:
    """Cells of a candidate's loss minus the mean loss of its matched controls. [num_cells]"""
    losses = np.arange(num_controls + 1)
    chances = binom.pmf(losses, num_controls, loss_rate)
    shares: dict[float, float] = {}
    for candidate, chance in ((1, loss_rate + difference), (0, 1 - loss_rate - difference)):
        for num_lost, control_chance in zip(losses, chances, strict=True):
            value = candidate - num_lost / num_controls
            shares[value] = shares.get(value, 0.0) + chance * control_chance
    return _spread(shares)


def forecast_differences(shares: Floats, claim: Claim, per_hour: float) -> Forecast:
    """Observations and hours until differences with these ``shares`` of cells are expected to show ``claim``."""
    num = expected_num(shares, DIFFERENCE, claim.null_mean, claim.side, claim.log_threshold)
    return _forecast(num, per_hour)


def forecast_rate(rate: float, claim: Claim, per_hour: float) -> Forecast:
    """The same for a rate, such as exceedances of a latency limit."""
    shares = np.array([1 - rate, 0.0, rate])
    num = expected_num(shares, RATE, claim.null_mean, claim.side, claim.log_threshold)
    return _forecast(num, per_hour)


def _forecast(num: int | None, per_hour: float) -> Forecast:
    if num is None or per_hour <= 0:
        return Forecast(num, None)
    return Forecast(num, math.ceil(10 * num / per_hour) / 10)


def _spread(shares: dict[float, float]) -> Floats:
    values = np.array(list(shares))
    cells = cells_of(values, DIFFERENCE)
    weights = np.array(list(shares.values()), dtype=np.float64)
    spread = np.bincount(cells, weights=weights, minlength=DIFFERENCE.num_cells)
    return spread.astype(np.float64)
