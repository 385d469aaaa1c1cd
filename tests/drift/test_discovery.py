"""A shallow tree proposes the slice that looks worst."""

from __future__ import annotations

import numpy as np
import pytest

from drift.discovery import propose
from drift.segments import column_of

RNG = np.random.default_rng(10)
NUM = 4_000
LANG = RNG.choice(["en", "hi", "ta"], size=NUM)
TOPIC = RNG.choice(["billing", "code", "refund", "travel"], size=NUM)
COLUMNS = {"lang": column_of(LANG.tolist()), "topic": column_of(TOPIC.tolist())}


def noise(rate: float = 0.05) -> np.ndarray:
    return np.asarray((RNG.random(NUM) < rate).astype(float) - (RNG.random(NUM) < 0.05))


def test_a_two_way_slice_is_proposed() -> None:
    bad = (LANG == "hi") & (TOPIC == "refund")
    differences = np.where(bad, noise(0.35), noise())
    proposal = propose(COLUMNS, differences, tolerance=0.02, minimum=50, known=frozenset())
    assert proposal is not None
    assert proposal.segment == (("lang", "hi"), ("topic", "refund"))
    assert proposal.n == bad.sum()


def test_a_slice_that_is_judged_already_is_not_proposed_again() -> None:
    bad = (LANG == "hi") & (TOPIC == "refund")
    known = frozenset({(("lang", "hi"), ("topic", "refund"))})
    proposal = propose(
        COLUMNS, np.where(bad, noise(0.35), noise()), tolerance=0.02, minimum=50, known=known
    )
    assert proposal is None or proposal.segment not in known


@pytest.mark.parametrize("differences", [np.zeros(NUM), np.full(NUM, -0.5)])
def test_nothing_bad_proposes_nothing(differences: np.ndarray) -> None:
    assert propose(COLUMNS, differences, tolerance=0.02, minimum=50, known=frozenset()) is None


def test_no_past_and_no_keys_propose_nothing() -> None:
    empty = {"lang": column_of([])}
    assert propose(empty, np.zeros(0), tolerance=0.02, minimum=50, known=frozenset()) is None
    assert propose({}, noise(), tolerance=0.02, minimum=50, known=frozenset()) is None
