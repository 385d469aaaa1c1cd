"""Betting e-processes on bounded observations: evidence that may be looked at after every observation.

The state of a stream is a histogram of its observations, nothing else: histograms add, forget the order in which
observations came, and can be computed again from the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Bets as fractions of the largest bet that cannot lose everything. Their mixture costs log(24) at most against the best
# of them in hindsight, and makes the process a function of the counts alone.
BETS: Floats = np.geomspace(0.01, 0.95, 24)
ON_GRID = 1e-9
BISECTIONS = 40
NEVER = 10_000_000


class Side(Enum):
    """What is claimed of the mean."""

    ABOVE = 1
    BELOW = -1


@dataclass(frozen=True, slots=True)
class Support:
    """The interval of possible observations, cut into ``num_steps`` equal steps.

    Cells alternate: grid point, the open interval after it, grid point, and so on. An observation between two grid
    points is rounded when it is used, and always against the claim.
    """

    low: float
    high: float
    num_steps: int

    @property
    def num_cells(self) -> int:
        """Cells of a histogram."""
        return 2 * self.num_steps + 1

    def values(self, side: Side) -> Floats:
        """What an observation of each cell is worth to a claim on ``side``. [num_cells]"""
        cells = np.arange(self.num_cells)
        steps = cells // 2 if side is Side.ABOVE else (cells + 1) // 2
        return self.low + (self.high - self.low) * steps / self.num_steps

    def middles(self) -> Floats:
        """The middle of each cell. [num_cells]"""
        return (self.values(Side.ABOVE) + self.values(Side.BELOW)) / 2


DIFFERENCE = Support(-1.0, 1.0, 40)
RATE = Support(0.0, 1.0, 1)


def cells_of(observations: ArrayLike, support: Support) -> Counts:
    """The cell of each observation.

    Raises:
        ValueError: an observation is not a number of the support.
    """
    values = np.asarray(observations, dtype=np.float64)
    if not np.all((values >= support.low) & (values <= support.high)):
        raise ValueError(f"Observations must lie in [{support.low}, {support.high}].")
    steps = (values - support.low) / (support.high - support.low) * support.num_steps
    nearest = np.rint(steps)
    is_on_grid = np.abs(steps - nearest) < ON_GRID
    return np.where(is_on_grid, 2 * nearest, 2 * np.floor(steps) + 1).astype(np.int64)


def count(observations: ArrayLike, support: Support) -> Counts:
    """The histogram of ``observations``. [num_cells]"""
    counts = np.bincount(cells_of(observations, support), minlength=support.num_cells)
    return counts.astype(np.int64)


def log_e_values(counts: Counts, support: Support, null_mean: ArrayLike, side: Side) -> Floats:
    """Evidence, per stream, that the mean lies beyond ``null_mean`` on ``side``; natural logarithms.

    Fixed bets, averaged: E = mean over k of prod over i of (1 + s lambda_k (x_i - m)), which is exp of a sum over the
    counts. While the mean of each observation given the past is on the other side of m, each product is a non-negative
    supermartingale that starts at 1, so E ever reaches 1 / alpha with probability at most alpha.

    Args:
        counts: one histogram per stream, [..., num_cells].
        null_mean: one for all streams, or one each.

    Sources: Ville (1939), Etude critique de la notion de collectif, for the inequality; Waudby-Smith and Ramdas (2024),
    J. R. Stat. Soc. B 86, 1-27, section 4, for the capital process K_t(m) = prod (1 + lambda_i (X_i - m)). Bets are
    constant and mixed instead of adaptive, so that counts suffice.
    """
    return _log_mean(_log_capital(counts, support, null_mean, side))


def confidence_sequence(counts: Counts, support: Support, alpha: float) -> tuple[Floats, Floats]:
    """Bounds of the mean that hold at all times together with probability 1 - alpha: lower, upper. [...]

    Every mean is excluded that one of the two e-processes rejects at alpha / 2. Evidence falls as the null mean moves
    towards the claim, so the bounds are found by bisection; they end on the cautious side.

    Source: Waudby-Smith and Ramdas (2024), theorem 3 (hedged capital), with the same mixture on either side.
    """
    return (
        _bound(counts, support, Side.ABOVE, math.log(2 / alpha)),
        _bound(counts, support, Side.BELOW, math.log(2 / alpha)),
    )


def log_average(log_e: Floats, weights: ArrayLike | None = None) -> float:
    """The weighted mean of e-values, in logarithms: an e-value for "no null is false", under any dependence.

    Weights must be fixed before the data and add up to one; equal ones where none are given. The mean is never below
    what a Bonferroni correction by the same weights would accept.

    Source: Vovk and Wang (2021), Annals of Statistics 49, 1736-1754, proposition 3.1.
    """
    if log_e.size == 0:
        return 0.0
    shares = np.full(log_e.size, 1 / log_e.size) if weights is None else np.asarray(weights)
    largest = float(log_e.max())
    return largest + math.log(float((shares * np.exp(log_e - largest)).sum()))


def e_bh(log_e: Floats, alpha: float) -> Mask:
    """Which nulls to reject so that the expected share of wrong ones is at most alpha, under any dependence.

    Rejects the k largest, k the greatest rank with k e_[k] / G >= 1 / alpha. E-values may be multiplied by weights
    beforehand that were fixed before the data and add up to G at most.

    Source: Wang and Ramdas (2022), J. R. Stat. Soc. B 84, 822-852, the base e-BH procedure.
    """
    order = np.argsort(-log_e, kind="stable")
    ranks = np.arange(1, log_e.size + 1)
    reaches = log_e[order] >= np.log(log_e.size / (alpha * ranks)) - 1e-12
    num_rejected = int(ranks[reaches].max(initial=0))
    rejected = np.zeros(log_e.size, dtype=np.bool_)
    rejected[order[:num_rejected]] = True
    return rejected


def spending_weight(number: int) -> float:
    """The share of an error budget that the ``number``-th hypothesis (from 1) may spend; all shares add up to one."""
    return 6 / (math.pi * number) ** 2


def num_until(
    counts: Counts, support: Support, null_mean: float, side: Side, log_threshold: float
) -> int | None:
    """How many more observations one stream is expected to take to the threshold; none when it would never get there.

    Further observations are taken to come as those so far, so this is the course of the median, not a bound.
    """
    if not counts.sum():
        return None
    capital = _log_capital(counts, support, null_mean, side)
    return num_from(capital, capital / counts.sum(), log_threshold)


def expected_num(
    shares: Floats, support: Support, null_mean: float, side: Side, log_threshold: float
) -> int | None:
    """How many observations a stream with these ``shares`` of cells is expected to take to the threshold. [num_cells]"""
    growth = shares @ _log_factors(support, np.asarray(null_mean), side).T
    return num_from(np.zeros(BETS.size), growth, log_threshold)


def num_from(capital: Floats, growth: Floats, log_threshold: float) -> int | None:
    """The least m at which the mixture of bets that hold ``capital`` and gain ``growth`` per step reaches it. [num_bets]"""

    def reaches(steps: int) -> bool:
        return bool(_log_mean(capital + steps * growth) >= log_threshold)

    if not reaches(NEVER):
        return None
    low, high = -1, NEVER
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _bound(counts: Counts, support: Support, side: Side, log_threshold: float) -> Floats:
    """The last mean, seen from the far end of the support, that evidence for ``side`` still excludes."""
    excluded = np.full(counts.shape[:-1], support.low if side is Side.ABOVE else support.high)
    kept = np.full(counts.shape[:-1], support.high if side is Side.ABOVE else support.low)
    for _ in range(BISECTIONS):
        middle = (excluded + kept) / 2
        is_excluded = log_e_values(counts, support, middle, side) >= log_threshold
        excluded = np.where(is_excluded, middle, excluded)
        kept = np.where(is_excluded, kept, middle)
    return excluded


def _log_mean(log_values: Floats) -> Floats:
    """The mean over the last axis of what these are logarithms of; nothing overflows."""
    largest = log_values.max(axis=-1, keepdims=True)
    return np.asarray(largest[..., 0] + np.log(np.exp(log_values - largest).mean(axis=-1)))


def _log_capital(counts: Counts, support: Support, null_mean: ArrayLike, side: Side) -> Floats:
    """What each bet has made of 1. [..., num_bets]"""
    used = np.flatnonzero(counts.reshape(-1, support.num_cells).any(axis=0))
    factors = _log_factors(support, np.asarray(null_mean, dtype=np.float64), side, used)
    observed = counts[..., used].astype(np.float64)
    if factors.ndim == 2:
        return np.asarray(observed @ factors.T)
    return np.asarray((factors @ observed[..., None])[..., 0])


def _log_factors(
    support: Support, null_mean: Floats, side: Side, cells: Counts | None = None
) -> Floats:
    """log(1 + s lambda_k (v - m)) for each bet and cell; at worst log(1 - 0.95). [..., num_bets, num_cells]"""
    if not np.all((null_mean > support.low) & (null_mean < support.high)):
        raise ValueError(f"The null mean must lie inside ({support.low}, {support.high}).")
    values = support.values(side) if cells is None else support.values(side)[cells]
    room = null_mean - support.low if side is Side.ABOVE else support.high - null_mean
    gains = side.value * (values - null_mean[..., None]) / room[..., None]
    return np.log1p(BETS[:, None] * gains[..., None, :])
