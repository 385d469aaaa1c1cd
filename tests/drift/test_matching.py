"""Which answers may be compared: each trap that makes equal versions look unequal, and the draw of controls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drift.matching import ABSENT, Matches, Traffic, find_comparable, match_blocks

INCUMBENT, CANDIDATE = False, True


def traffic_of(*rows: dict[str, Any]) -> Traffic:
    """Requests at one second each, in the given order; blocks last 100 seconds."""

    def column(key: str, default: Any, dtype: Any) -> Any:
        return np.array([row.get(key, default) for row in rows], dtype=dtype)

    at = np.array([row.get("at", float(number)) for number, row in enumerate(rows)])
    return Traffic(
        at=at,
        is_candidate=column("arm", INCUMBENT, np.bool_),
        is_shadow=column("pair", ABSENT, np.int64) != ABSENT,
        pair=column("pair", ABSENT, np.int64),
        prompt=column("prompt", ABSENT, np.int64),
        user=column("user", ABSENT, np.int64),
        scorer=column("scorer", ABSENT, np.int64),
        draw=np.arange(len(rows), dtype=np.uint64),
        block_s=100.0,
    )


def pair(number: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"pair": number, "arm": arm} | fields for arm in (INCUMBENT, CANDIDATE)]


def test_a_repeated_prompt_counts_once() -> None:
    comparable = find_comparable(
        traffic_of(*pair(0, prompt=7), *pair(1, prompt=7), *pair(2, prompt=8))
    )
    assert comparable.pairs.candidates.tolist() == [1, 5]
    assert comparable.num_repeats == 1


def test_of_pairs_one_counts_per_user_and_block() -> None:
    rows: list[dict[str, Any]] = [*pair(0, user=1), *pair(1, user=1), *pair(2, user=1, at=150.0)]
    assert find_comparable(traffic_of(*rows)).pairs.candidates.tolist() == [1, 5]


def test_a_pair_whose_copy_was_dropped_is_unobserved() -> None:
    rows: list[dict[str, Any]] = [*pair(0), {"pair": 1}, *pair(2)]
    comparable = find_comparable(traffic_of(*rows))
    assert comparable.pairs.candidates.size == 2
    assert np.flatnonzero(comparable.dropped).tolist() == [2]
    assert comparable.intended.sum() == 3


def test_two_classifier_versions_are_not_compared() -> None:
    rows: list[dict[str, Any]] = [
        {"pair": 0, "scorer": 1},
        {"pair": 0, "arm": CANDIDATE, "scorer": 2},
        *pair(1, scorer=1),
    ]
    comparable = find_comparable(traffic_of(*rows))
    assert comparable.num_mixed == 1
    assert comparable.pairs.candidates.tolist() == [3]


def test_a_pair_is_known_when_it_and_all_before_it_have_ended() -> None:
    rows: list[dict[str, Any]] = [
        {"pair": 0, "at": 0.0},
        {"pair": 1, "at": 1.0},
        {"pair": 1, "arm": CANDIDATE, "at": 2.0},
        {"pair": 0, "arm": CANDIDATE, "at": 80.0},
        *pair(2, at=90.0),
    ]
    pairs = find_comparable(traffic_of(*rows)).pairs
    assert sorted(pairs.candidates.tolist()) == [2, 3, 5]
    assert pairs.known_at.tolist() == [80.0, 80.0, 90.0]


def test_in_a_canary_a_user_counts_once_or_once_per_block() -> None:
    rows: list[dict[str, Any]] = [
        {"user": 1},
        {"user": 1},
        {"user": 1, "at": 150.0},
        {"user": 2, "at": 160.0},
    ]
    traffic = traffic_of(*rows)
    assert find_comparable(traffic).pool.tolist() == [True, False, False, True]
    per_block = find_comparable(traffic, users_once_per_block=True)
    assert per_block.pool.tolist() == [True, False, True, True]


def test_a_prompt_that_both_arms_met_is_compared_with_itself() -> None:
    rows = [{"prompt": 1}, {"prompt": 1}, {"prompt": 1, "arm": CANDIDATE}, {"prompt": 2}]
    comparable = find_comparable(traffic_of(*rows))
    assert comparable.pairs.candidates.tolist() == [2]
    assert comparable.pairs.controls.tolist() == [0]
    assert comparable.pool.tolist() == [False, False, False, True]


def test_a_prompt_that_one_arm_met_again_and_again_is_left_out_of_both() -> None:
    comparable = find_comparable(traffic_of({"prompt": 1}, {"prompt": 1}, {"arm": CANDIDATE}))
    assert comparable.pool.tolist() == [False, False, True]
    assert comparable.num_unfair == 2


def test_a_prompt_of_an_earlier_block_is_out_of_both_arms() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": 1},
        {"prompt": 1, "at": 150.0, "arm": CANDIDATE},
        {"prompt": 1, "at": 160.0},
    ]
    assert find_comparable(traffic_of(*rows)).pool.tolist() == [True, False, False]


def test_shadow_and_canary_share_their_prompts() -> None:
    rows: list[dict[str, Any]] = [
        *pair(0, prompt=1),
        {"prompt": 1, "arm": CANDIDATE},
        {"prompt": 2, "arm": CANDIDATE},
    ]
    assert find_comparable(traffic_of(*rows)).pool.tolist() == [False, False, False, True]


def test_controls_come_from_the_same_block_and_classifier() -> None:
    rows = [
        {"at": 1.0, "scorer": 1},
        {"at": 2.0, "scorer": 2},
        {"at": 3.0, "arm": CANDIDATE, "scorer": 2},
        {"at": 150.0, "scorer": 2},
        {"at": 250.0, "arm": CANDIDATE, "scorer": 2},
    ]
    traffic = traffic_of(*rows)
    matches = match_blocks(traffic, np.ones(5, np.bool_))
    assert matches.candidates.tolist() == [2]
    assert matches.controls.tolist() == [1]
    assert matches.known_at.tolist() == [100.0]


@pytest.mark.parametrize(
    ("num_incumbent", "num_candidate", "per_candidate", "num_matched"),
    [(12, 2, 5, 2), (9, 2, 4, 2), (7, 2, 2, 2), (3, 2, 1, 2), (2, 5, 1, 2), (0, 3, 0, 0)],
)
def test_a_block_gives_as_many_controls_as_it_has_for_all(
    num_incumbent: int, num_candidate: int, per_candidate: int, num_matched: int
) -> None:
    rows: list[dict[str, Any]] = [{}] * num_incumbent + [{"arm": CANDIDATE}] * num_candidate
    traffic = traffic_of(*rows)
    matches = match_blocks(traffic, np.ones(len(rows), np.bool_))
    assert matches.num_controls.tolist() == [per_candidate] * num_matched


canaries = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=80
)


@given(canaries)
@settings(max_examples=60)
def test_no_control_is_used_twice_and_none_crosses_a_block(
    rows: list[tuple[bool, int, int]],
) -> None:
    ordered = sorted(rows, key=lambda row: row[1])
    traffic = traffic_of(
        *({"arm": arm, "at": 100.0 * block, "scorer": scorer} for arm, block, scorer in ordered)
    )
    matches = match_blocks(traffic, np.ones(len(rows), np.bool_))
    assert np.unique(matches.controls).size == matches.controls.size
    assert not traffic.is_candidate[matches.controls].any()
    assert traffic.is_candidate[matches.candidates].all()
    owner = np.repeat(matches.candidates, matches.num_controls)
    for column in (traffic.block, traffic.scorer):
        assert (column[owner] == column[matches.controls]).all()


def test_a_difference_is_taken_from_the_mean_of_the_controls() -> None:
    matches = Matches(np.array([0, 1]), np.array([2, 3, 4]), np.array([2, 1]), np.zeros(2))
    differences = matches.differences(np.array([1.0, 0.0, 1.0, 0.0, 1.0]))
    assert differences.tolist() == [0.5, -1.0]


def test_joining_keeps_each_candidate_with_its_controls() -> None:
    late = Matches(np.array([0]), np.array([2, 3]), np.array([2]), np.array([9.0]))
    early = Matches(np.array([1]), np.array([4]), np.array([1]), np.array([3.0]))
    both = late.joined(early)
    assert both.candidates.tolist() == [1, 0]
    assert both.controls.tolist() == [4, 2, 3]
    assert both.select(np.array([False, True])).controls.tolist() == [2, 3]


def test_swapping_the_arms_turns_a_cost_ratio_round() -> None:
    costs = np.array([3.0, 1.0, 0.0, 0.0])
    there = Matches(np.array([0, 2]), np.array([1, 3]), np.ones(2, np.int64), np.zeros(2))
    back = Matches(np.array([1, 3]), np.array([0, 2]), np.ones(2, np.int64), np.zeros(2))
    assert there.ratios(costs).tolist() == [0.5, 0.0]
    assert back.ratios(costs).tolist() == [-0.5, 0.0]


def test_no_traffic_has_nothing_to_compare() -> None:
    comparable = find_comparable(traffic_of())
    assert comparable.pairs.candidates.size == 0
    assert match_blocks(traffic_of(), comparable.pool).candidates.size == 0
