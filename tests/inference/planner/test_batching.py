"""Static against continuous batching: the published case, a simulation, and what cannot be."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.planner.batching import (
    batch_continuously,
    batch_statically,
    expected_waste,
    geometric,
)
from inference.planner.shape import InvalidPlan

LENGTHS = (4, 10, 14, 16)


def test_a_static_batch_is_held_until_its_longest_answer_ends() -> None:
    steps = batch_statically(LENGTHS, 4)
    assert (steps.held, steps.used, steps.wasted, steps.num_steps) == (64, 44, 20, 16)
    assert steps.waste == 0.3125


def test_in_continuous_batching_the_next_takes_the_place_of_who_ends() -> None:
    # Slots: 4 then 3, 10; the two that follow wait for whoever ends first: at 4 (3 more: 7) and at 7 (5 more: 12).
    steps = batch_continuously((4, 10, 3, 5), 2)
    assert (steps.num_steps, steps.wasted) == (12, 0)
    assert batch_statically((4, 10, 3, 5), 2).num_steps == 15


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), batch=st.integers(1, 8))
def test_continuous_batching_is_never_slower(lengths: list[int], batch: int) -> None:
    static, continuous = batch_statically(lengths, batch), batch_continuously(lengths, batch)
    assert continuous.num_steps <= static.num_steps
    assert continuous.held == static.used <= static.held
    assert continuous.num_steps >= max(max(lengths), sum(lengths) / batch)


def test_the_expected_waste_is_that_of_many_batches() -> None:
    distribution, batch = {8: 1.0, 64: 2.0, 256: 1.0}, 16
    noise = random.Random(7)  # noqa: S311
    drawn = noise.choices(list(distribution), list(distribution.values()), k=16 * 4000)
    assert expected_waste(distribution, batch) == pytest.approx(
        batch_statically(drawn, batch).waste, abs=0.01
    )


def test_equal_lengths_and_a_batch_of_one_waste_nothing() -> None:
    assert expected_waste({100: 1.0}, 32) == pytest.approx(0)
    assert expected_waste(geometric(50), 1) == pytest.approx(0, abs=1e-6)


def test_geometric_lengths_have_their_mean() -> None:
    lengths = geometric(37)
    assert sum(lengths.values()) == pytest.approx(1, abs=1e-6)
    assert sum(length * share for length, share in lengths.items()) == pytest.approx(37, rel=1e-4)


@pytest.mark.parametrize("mean", [1, 999, 1000, 4900, 20_000, 10**7])
def test_long_answers_are_put_together_and_keep_their_mean_and_waste(mean: int) -> None:
    """Of a batch of 8 the longest is 1 + 1/2 + ... + 1/8 means long, where single tokens do not count."""
    lengths = geometric(mean)
    assert len(lengths) < 25_000
    assert sum(length * share for length, share in lengths.items()) == pytest.approx(mean, rel=2e-3)
    if mean > 100:
        harmonic = sum(1 / number for number in range(1, 9))
        assert expected_waste(lengths, 8) == pytest.approx(1 - 1 / harmonic, abs=2e-3)


@pytest.mark.parametrize(
    ("lengths", "batch", "name"), [((), 4, "lengths"), ((4, 0), 4, "lengths"), ((4,), 0, "batch")]
)
def test_what_cannot_be_batched_is_named(lengths: tuple[int, ...], batch: int, name: str) -> None:
    with pytest.raises(InvalidPlan) as refusal:
        batch_statically(lengths, batch)
    assert refusal.value.name == name
    with pytest.raises(InvalidPlan):
        geometric(0.5)
