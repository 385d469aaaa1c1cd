"""What was never observed, and whether it is like the rest."""

from __future__ import annotations

import numpy as np
import pytest

from drift.coverage import Floats, coverage_of, find_informative_dropping, of_key
from drift.segments import column_of

NUM = 4_000
RNG = np.random.default_rng(8)
LANGS = RNG.choice(["en", "hi", "ta"], size=NUM, p=[0.6, 0.3, 0.1]).tolist()
COLUMNS = {"lang": column_of(LANGS)}
ALL = np.ones(NUM, dtype=np.bool_)
NO_LOSS = np.zeros(NUM)


def losses(rng: np.random.Generator, rate: float) -> Floats:
    return (rng.random(NUM) < rate).astype(np.float64)


def test_the_p_value_is_that_of_a_published_table() -> None:
    """Mendel's peas (1866), 315 : 108 round and 101 : 32 wrinkled, yellow : green: chi-square 0.116 without correction.

    With one degree of freedom that is p = 0.733; so little is not reported, and hence asked of the test itself.
    """
    is_round = np.repeat([True, False], [423, 133])
    is_green = np.repeat([False, True, False, True], [315, 108, 101, 32])
    column = column_of("round" if value else "wrinkled" for value in is_round)
    imbalance = of_key("shape", column.codes, column.names, is_green, np.ones(556, np.bool_))
    assert imbalance is not None
    assert imbalance.p_value == pytest.approx(0.733, abs=0.001)
    assert imbalance.share == pytest.approx(32 / 133)


def test_equal_dropping_is_reported_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(9)
    reports = sum(
        bool(find_informative_dropping(COLUMNS, rng.random(NUM) < 0.2, ALL, losses(rng, 0.05)))
        for _ in range(300)
    )
    # At 0.1 % each, 300 runs are expected to report 0.3 times.
    assert reports <= 3


def test_drops_that_hit_what_the_incumbent_does_badly_are_reported() -> None:
    loss = losses(RNG, 0.1)
    dropped = RNG.random(NUM) < 0.1 + 0.4 * loss
    found = find_informative_dropping(COLUMNS, dropped, ALL, loss)
    assert [imbalance.key for imbalance in found] == ["incumbent_loss"]


@pytest.mark.parametrize("dropped", [np.zeros(NUM, np.bool_), np.ones(NUM, np.bool_)])
def test_nothing_or_everything_dropped_has_no_pattern(dropped: np.ndarray) -> None:
    assert find_informative_dropping(COLUMNS, dropped, ALL, NO_LOSS) == []


def test_coverage_is_the_observed_share_of_what_was_intended() -> None:
    assert coverage_of(
        np.array([True, False, False, True]), np.array([True, True, True, False])
    ) == pytest.approx(2 / 3)
    assert coverage_of(np.zeros(0, np.bool_), np.zeros(0, np.bool_)) == 1.0
