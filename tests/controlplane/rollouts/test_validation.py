"""Policies that guide rollouts: their steps, what cannot be, and what the declared traffic cannot reach in time."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.rollouts.documents import InvalidPolicy
from controlplane.rollouts.policy import Policy, parse_policy
from controlplane.rollouts.presets import PRESETS
from controlplane.rollouts.steps import (
    Kind,
    Until,
    describe_step,
    evidence_step,
    largest_bp,
    parse_steps,
)
from controlplane.rollouts.validation import check_policy

SHADOW = {"type": "shadow", "share": 0.5}
CANARY = {"type": "canary", "bp": 100}
FLAGS = {"kind": "flags", "modes": ["shadow"]}


def policy(**fields: Any) -> Policy:
    values: dict[str, Any] = {"metrics": {"flag_rate": FLAGS}, "steps": [SHADOW]}
    return parse_policy(values | fields)


def test_steps_have_defaults_and_keep_what_is_given() -> None:
    shadow, canary, pause, bake = parse_steps(
        [SHADOW, {**CANARY, "until": "floor", "for_s": 60}, {"type": "pause"}, {"type": "bake"}]
    )
    assert (shadow.kind, shadow.share, shadow.self_share, shadow.floor) == (
        Kind.SHADOW,
        0.5,
        0.01,
        100,
    )
    assert (canary.canary_bp, canary.until, canary.for_s) == (100, Until.FLOOR, 60)
    assert (pause.for_s, bake.for_s, bake.deadline_s) == (None, 3600, 7 * 86_400)


def test_a_step_that_waits_goes_on_with_the_traffic_before_it() -> None:
    steps = parse_steps([SHADOW, CANARY, {"type": "approval"}, {**CANARY, "bp": 500}])
    assert evidence_step(steps, -1) is None
    assert evidence_step(steps, 2) is steps[1]
    assert [largest_bp(steps, index) for index in (-1, 0, 1, 2, 3)] == [0, 0, 100, 100, 500]
    assert [describe_step(step) for step in steps[:3]] == [
        "shadow of 50%",
        "canary at 1 %",
        "approval",
    ]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([{"type": "leap"}], "steps[0].type='leap' must be one of score, shadow"),
        ([{**SHADOW, "bp": 5}], "steps[0].bp is unknown"),
        ([{"type": "canary"}], "steps[0].bp is missing"),
        ([{**CANARY, "bp": 10_001}], "must be at most 10000"),
        ([{**SHADOW, "share": 1.5}], "steps[0].share=1.5"),
        ([{**SHADOW, "until": "bored"}], "steps[0].until='bored' must be one of pass, floor"),
        ([{**CANARY, "bp": 500}, CANARY], "canary shares [500, 100] must rise"),
        ([{"type": "bake"}, SHADOW], "bake comes once, and last"),
        ([{"type": "pause"}], "none of them gathers evidence"),
        ([SHADOW, {"type": "pause", "for_s": 900, "deadline_s": 600}], "longer than its deadline"),
        ("shadow", "must be a list"),
    ],
)
def test_steps_that_cannot_be_are_refused_by_name(steps: Any, told: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        parse_policy({"steps": steps})
    assert told in refused.value.message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"steps": []}, "steps is empty"),
        ({"segments": {"keys": ["language"]}}, "'language' is no key of segments"),
        ({"metrics": {"m": {**FLAGS, "segments": ["tags."]}}}, "metrics.m.segments: 'tags.'"),
        ({"metrics": {"m": {"kind": "vibes"}}}, "metrics.m.kind='vibes' must be one of"),
        ({"metrics": {"m": {**FLAGS, "critical": "no"}}}, "metrics.m.critical='no'"),
        ({"metrics": {"m": {**FLAGS, "critical": False}}}, "none is critical"),
        ({"metrics": {"m": {**FLAGS, "flags": ["rude"]}}}, "'rude' is no flag: use refusal"),
        ({"metrics": {"m": {"kind": "flags"}}}, "cannot be measured on canary"),
        ({"metrics": {"m": {"kind": "latency"}}}, "judged on canary traffic, which no step brings"),
        (
            {"metrics": {"m": {"kind": "cost", "field": "dollars"}}},
            "field='dollars' is not measured",
        ),
        ({"metrics": {"m": {"kind": "score", "field": "taste"}}}, "field='taste' is not measured"),
        (
            {"steps": [{**SHADOW, "until": "floor"}], "promote": True},
            "needs a shadow or canary step",
        ),
        ({"in_flight": "drop"}, "in_flight='drop' must be one of finish"),
        ({"standby_s": -1}, "standby_s=-1"),
        ({"traffic": [{"segment": {"colour": "red"}, "per_hour": 1}]}, "'colour' is no key"),
        ({"traffic": [{"per_hour": "many"}]}, "traffic.per_hour='many'"),
    ],
)
def test_policies_that_could_not_guide_a_rollout_are_refused(fields: Any, told: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        check_policy(policy(**fields))
    assert told in refused.value.message


def test_a_margin_that_the_declared_traffic_cannot_reach_in_time_is_told_with_the_hours() -> None:
    traffic = [{"segment": {}, "per_hour": 2000}, {"segment": {"lang": "hi"}, "per_hour": 20}]
    steps = [{**SHADOW, "deadline_s": 3600}]
    with pytest.raises(InvalidPolicy) as refused:
        check_policy(policy(traffic=traffic, steps=steps))
    told = refused.value.message
    assert told.startswith("steps[0] (shadow of 50%): flag_rate on")
    assert "hours of this traffic; the deadline is 1 hours" in told
    check_policy(policy(traffic=traffic))


def test_a_gate_that_an_earlier_step_ends_with_is_not_asked_for_again() -> None:
    metrics = {"failure_rate": {"kind": "flags", "flags": []}}
    traffic = [{"segment": {}, "per_hour": 2000}]
    canary = {**CANARY, "deadline_s": 700}
    check_policy(policy(metrics=metrics, traffic=traffic, steps=[SHADOW, canary]))
    with pytest.raises(InvalidPolicy, match="canary at 1 %"):
        check_policy(policy(metrics=metrics, traffic=traffic, steps=[canary]))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_guide_a_rollout(name: str) -> None:
    preset = parse_policy(PRESETS[name])
    check_policy(preset)
    assert preset.promotes == (name != "shadow-only")


def test_a_gate_may_ask_for_few_segments() -> None:
    rule = policy(metrics={"m": {**FLAGS, "segments": ["lang"]}}).metrics[0]
    assert rule.judges(())
    assert rule.judges((("lang", "hi"),))
    assert not rule.judges((("topic", "refund"),))
    assert not rule.judges((("lang", "hi"), ("topic", "refund")))
