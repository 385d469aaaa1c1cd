"""Tail latency as a rate: how often a request takes longer than a limit that was fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

Floats = NDArray[np.float64]

QUANTILE = 0.99
SLACK = 1.2
CONFIDENCE = 0.975


@dataclass(frozen=True, slots=True)
class Limit:
    """The latency that at most ``1 - quantile`` of requests may exceed, and where it comes from.

    ``bound_ms`` is the upper confidence bound of the incumbent's quantile over its ``n`` requests.
    """

    limit_ms: float
    quantile: float
    bound_ms: float
    n: int


def upper_quantile_bound(
    latencies_ms: Floats, quantile: float = QUANTILE, confidence: float = CONFIDENCE
) -> float | None:
    """The smallest order statistic that is at least the true quantile with ``confidence``; none if n is too small.

    The number of observations below the true quantile is binomial, so X_(k) lies below it with probability
    P(B >= k). Ties and atoms only help.

    Source: Conover (1999), Practical Nonparametric Statistics, section 3.2, confidence interval for a quantile.
    """
    n = latencies_ms.size
    ranks = np.arange(1, n + 1)
    is_enough = binom.cdf(ranks - 1, n, quantile) >= confidence
    if not is_enough.any():
        return None
    return float(np.sort(latencies_ms)[np.argmax(is_enough)])


def fix_limit(
    latencies_ms: Floats, quantile: float = QUANTILE, slack: float = SLACK
) -> Limit | None:
    """The limit that the incumbent's latencies set for a candidate; none while they are too few."""
    known = latencies_ms[np.isfinite(latencies_ms)]
    bound = upper_quantile_bound(known, quantile)
    if bound is None:
        return None
    return Limit(slack * bound, quantile, bound, int(known.size))


def exceedances(latencies_ms: Floats, failed: NDArray[np.bool_], limit_ms: float) -> Floats:
    """1 where a request took longer than the limit or never answered, 0 where it kept it, NaN where not measured."""
    exceeded = np.where(np.isnan(latencies_ms), np.nan, latencies_ms > limit_ms)
    return np.where(failed, 1.0, exceeded)
