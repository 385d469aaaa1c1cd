"""p99 as a rate: the limit from the incumbent, and what exceeds it."""

from __future__ import annotations

import numpy as np
import pytest

from drift.latency import exceedances, fix_limit, upper_quantile_bound


@pytest.mark.parametrize(("quantile", "least"), [(0.95, 59), (0.99, 299)])
def test_the_least_sample_is_that_of_wilks(quantile: float, least: int) -> None:
    """Wilks (1941): the largest of 59 (299) is an upper bound of the 95th (99th) percentile with confidence 95 %."""
    values = np.arange(float(least))
    assert upper_quantile_bound(values, quantile, 0.95) == least - 1
    assert upper_quantile_bound(values[1:], quantile, 0.95) is None


def test_the_bound_lies_above_the_true_quantile_as_often_as_promised() -> None:
    rng = np.random.default_rng(6)
    true_p99 = -np.log(0.01)
    bounds = [upper_quantile_bound(rng.exponential(size=1_500)) for _ in range(1_000)]
    covered = np.mean([bound is not None and bound >= true_p99 for bound in bounds])
    # 97.5 % promised; two standard errors over 1,000 runs are one point.
    assert 0.965 <= covered <= 1.0


def test_a_limit_is_the_bound_with_slack_and_knows_its_sample() -> None:
    latencies = np.append(np.random.default_rng(7).lognormal(6, 0.4, size=2_000), np.nan)
    limit = fix_limit(latencies)
    assert limit is not None
    assert limit.n == 2_000
    assert limit.limit_ms == pytest.approx(1.2 * limit.bound_ms)
    assert limit.bound_ms >= np.nanquantile(latencies, 0.99)


@pytest.mark.parametrize("latencies", [np.zeros(0), np.full(10, np.nan), np.arange(100.0)])
def test_too_small_a_sample_fixes_no_limit(latencies: np.ndarray) -> None:
    assert fix_limit(latencies) is None


def test_equal_latencies_never_exceed_their_own_limit() -> None:
    latencies = np.full(1_000, 250.0)
    limit = fix_limit(latencies)
    assert limit is not None
    assert not exceedances(latencies, np.zeros(1_000, np.bool_), limit.limit_ms).any()


def test_a_request_without_an_answer_exceeds_and_one_not_measured_is_unknown() -> None:
    latencies = np.array([100.0, 300.0, np.nan, np.nan, 50.0])
    failed = np.array([False, False, False, True, True])
    expected = [0.0, 1.0, np.nan, 1.0, 1.0]
    np.testing.assert_array_equal(exceedances(latencies, failed, 200.0), expected)
