"""Which segments are judged, and who belongs to them."""

from __future__ import annotations

import pytest

from drift.segments import (
    OTHER,
    OVERALL,
    NotCovered,
    column_of,
    describe,
    length_band,
    members,
    plan_segments,
)

LANG = column_of(["en"] * 120 + ["hi"] * 60 + ["ta"] * 50 + ["de"] * 50 + [None] * 20)
TOPIC = column_of((["refund"] * 100 + ["billing"] * 200)[::-1])
COLUMNS = {"lang": LANG, "topic": TOPIC}


def test_small_values_are_pooled_and_listed() -> None:
    plan = plan_segments(COLUMNS, keys=["lang"], crossings=[], minimum=100)
    assert plan.judged == (OVERALL, (("lang", "en"),), (("lang", OTHER),))
    assert set(plan.not_covered) == {
        NotCovered((("lang", "hi"),), 60),
        NotCovered((("lang", "ta"),), 50),
        NotCovered((("lang", "de"),), 50),
    }
    assert members((("lang", OTHER),), COLUMNS, plan, 300).sum() == 160


def test_a_pool_that_is_too_small_is_not_judged() -> None:
    plan = plan_segments(COLUMNS, keys=["lang"], crossings=[], minimum=300)
    assert plan.judged == (OVERALL,)


def test_a_request_without_a_value_belongs_to_no_segment_of_that_key() -> None:
    plan = plan_segments(COLUMNS, keys=["lang"], crossings=[], minimum=10)
    sizes = [members(s, COLUMNS, plan, 300).sum() for s in plan.judged]
    assert sizes[0] == 300
    assert sum(sizes[1:]) == 280


def test_crossings_exist_only_where_they_are_named() -> None:
    singles = plan_segments(COLUMNS, keys=["lang", "topic"], crossings=[], minimum=50)
    assert all(len(segment) <= 1 for segment in singles.judged)
    crossed = plan_segments(COLUMNS, keys=[], crossings=[["topic", "lang"]], minimum=50)
    assert (("lang", "en"), ("topic", "billing")) in crossed.judged
    inside = members((("lang", "en"), ("topic", "billing")), COLUMNS, crossed, 300)
    assert inside.sum() == 120


def test_an_unknown_key_makes_no_segment() -> None:
    plan = plan_segments(COLUMNS, keys=["plan"], crossings=[["plan", "lang"]], minimum=1)
    assert plan.judged == (OVERALL,)


def test_nothing_at_all_leaves_all_traffic() -> None:
    empty = {"lang": column_of([])}
    plan = plan_segments(empty, keys=["lang"], crossings=[["lang", "topic"]], minimum=1)
    assert plan.judged == (OVERALL,)
    assert members(OVERALL, empty, plan, 0).size == 0


@pytest.mark.parametrize(
    ("length", "band"), [(0, "under 200"), (200, "200-999"), (9_999, "4000 and more")]
)
def test_lengths_have_bands(length: int, band: str) -> None:
    assert length_band(length) == band


def test_a_segment_reads_as_its_conditions() -> None:
    assert describe((("lang", "hi"), ("topic", "refund"))) == "lang=hi, topic=refund"
    assert describe(OVERALL) == "all traffic"
