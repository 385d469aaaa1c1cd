"""The first of several choices is the answer of a request for one; the others have seeds of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.engine.choices import choice_sampling, make_choices, sequence_id
from inference.protocol import SamplingParams

SEEDED = SamplingParams(seed=7, temperature=0.5, stop=("x",))


def test_the_first_choice_is_the_request_itself_and_the_parent_of_the_others() -> None:
    first, second, third = make_choices("r", [1, 2], SEEDED, n=3, cache_salt="k")
    assert (first.id, first.choice, first.parent, first.sampling) == ("r", 0, None, SEEDED)
    assert [(each.id, each.choice) for each in (second, third)] == [("r#1", 1), ("r#2", 2)]
    assert second.parent is first
    assert third.parent is first
    assert {each.request_id for each in (first, second, third)} == {"r"}
    assert {each.cache_salt for each in (first, second, third)} == {"k"}
    assert first.tokens is not second.tokens


def test_one_choice_is_a_request_as_any_other() -> None:
    [only] = make_choices("r", [1, 2], SEEDED)
    assert (only.id, only.parent, only.sampling) == (sequence_id("r", 0), None, SEEDED)


@pytest.mark.parametrize("seed", [7, -(2**63), 2**63 - 1, None])
def test_seeds_follow_from_seed_and_choice_alone(seed: int | None) -> None:
    sampling = replace(SEEDED, seed=seed)
    seeds = [choice_sampling(sampling, "r", choice).seed for choice in range(8)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 8
    assert seeds == [choice_sampling(sampling, "r", choice).seed for choice in range(8)]
    elsewhere = [choice_sampling(sampling, "other", choice).seed for choice in range(8)]
    assert (elsewhere == seeds) == (seed is not None)


def test_nothing_but_the_seed_differs() -> None:
    assert replace(choice_sampling(SEEDED, "r", 3), seed=7) == SEEDED
