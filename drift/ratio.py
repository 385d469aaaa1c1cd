"""Whether two arms share the traffic as it was meant: a test that may be looked at after every request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.special import betaln

# How sure an imbalance must be before anyone is told: a healthy experiment is called broken once in a thousand.
ALPHA = 0.001
# The prior holds as much weight as this many units, centred on the intended share.
CONCENTRATION = 200.0


@dataclass(frozen=True, slots=True)
class Arms:
    """How many units each arm had while the candidate was meant to have ``share`` of them."""

    share: float
    num_incumbent: int
    num_candidate: int


def log_e_of_imbalance(periods: Iterable[Arms]) -> float:
    """Evidence that the arms do not share the traffic as intended; natural logarithm.

    The Bayes factor of a beta-binomial, centred on the intended share, against the binomial of that share. Under the
    intended share it is a martingale that starts at 1, so it ever reaches 1 / alpha with probability at most alpha;
    periods with other shares multiply.

    Source: Lindon and Malek (2022), Anytime-Valid Inference For Multinomial Count Data, NeurIPS 35, section 3; two arms.
    """
    return sum((_log_e(period) for period in periods if 0 < period.share < 1), 0.0)


def expected_candidates(periods: Iterable[Arms]) -> float:
    """How many units the candidate should have had."""
    return sum(period.share * (period.num_incumbent + period.num_candidate) for period in periods)


def _log_e(period: Arms) -> float:
    a, b = CONCENTRATION * period.share, CONCENTRATION * (1 - period.share)
    x, y = period.num_candidate, period.num_incumbent
    log_marginal = betaln(a + x, b + y) - betaln(a, b)
    log_null = x * math.log(period.share) + y * math.log1p(-period.share)
    return float(log_marginal - log_null)
