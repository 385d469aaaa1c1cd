"""How long a policy will take."""

from __future__ import annotations

import pytest

from controlplane.rollouts.forecasts import Step, find_unreachable, forecast
from controlplane.rollouts.policy import (
    CANARY,
    SHADOW,
    SegmentTraffic,
    default_policy,
    parse_policy,
)
from drift.segments import OVERALL

REFUND = (("topic", "refund"),)
TRAFFIC = [SegmentTraffic(OVERALL, 4_000), SegmentTraffic(REFUND, 200)]


def test_each_gate_of_each_segment_has_its_hours() -> None:
    shadow = forecast(default_policy(), TRAFFIC, Step(SHADOW, 0.5))
    assert [(one.metric, one.segment) for one in shadow] == [
        ("flag_rate", OVERALL),
        ("flag_rate", REFUND),
    ]
    refund = shadow[1]
    assert refund.to_pass.num is not None
    assert refund.to_pass.hours == pytest.approx(refund.to_pass.num / 100, abs=0.11)
    assert refund.to_fail.num is not None


def test_a_canary_is_judged_on_the_tail_too_and_takes_longer() -> None:
    canary = forecast(default_policy(), TRAFFIC, Step(CANARY, 0.1))
    assert [one.metric for one in canary] == ["flag_rate", "flag_rate", "p99_latency"]
    shadow = forecast(default_policy(), TRAFFIC, Step(SHADOW, 0.1))
    for paired, matched in zip(shadow, canary, strict=False):
        assert paired.to_pass.num is not None
        assert matched.to_pass.num is not None
        assert matched.to_pass.hours is not None
        assert matched.to_fail.num is not None


def test_a_policy_that_will_not_end_in_time_is_told_with_the_numbers() -> None:
    expected = forecast(default_policy(), TRAFFIC, Step(SHADOW, 0.05))
    (late,) = find_unreachable(expected, deadline_hours=12)
    assert late[0].segment == REFUND
    assert "flag_rate on topic=refund needs" in late[1]
    assert "the deadline is 12 hours" in late[1]
    assert find_unreachable(expected, deadline_hours=1_000) == []


def test_without_traffic_no_deadline_is_kept() -> None:
    expected = forecast(default_policy(), [SegmentTraffic(REFUND, 0)], Step(SHADOW, 1.0))
    assert len(find_unreachable(expected, deadline_hours=1e9)) == 1


def test_a_rarer_flag_is_decided_sooner() -> None:
    policy = parse_policy({})
    rare, frequent = (
        forecast(policy, [SegmentTraffic(OVERALL, 1_000, loss)], Step(SHADOW, 1.0))[0].to_pass.num
        for loss in (0.001, 0.1)
    )
    assert rare is not None
    assert frequent is not None
    assert rare < frequent
