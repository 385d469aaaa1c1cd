"""Policies: defaults, what they refuse, and how they say so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.rollouts.documents import InvalidPolicy
from controlplane.rollouts.policy import (
    Discovery,
    Kind,
    default_policy,
    parse_policy,
    read_policy,
)


def test_the_default_takes_any_flag_for_a_loss_and_limits_the_tail() -> None:
    policy = default_policy()
    flags, tail = policy.metrics
    assert (flags.name, flags.kind, flags.flags) == ("flag_rate", Kind.FLAGS, None)
    assert (flags.tolerance, flags.margin, flags.overall_margin) == (0.02, 0.05, 0.02)
    assert (tail.kind, tail.slack, tail.tolerance, tail.modes) == (
        Kind.LATENCY,
        1.2,
        0.01,
        ("canary",),
    )
    assert (policy.alpha, policy.keys, policy.crossings) == (0.05, ("lang", "topic", "tenant"), ())
    assert policy.discovery == Discovery(2_000, 50)


def test_an_empty_object_is_the_default() -> None:
    assert parse_policy({}) == default_policy()


def test_a_whole_policy_is_read() -> None:
    document = {
        "alpha": 0.01,
        "segments": {"keys": ["tags.plan"], "crossings": [["topic", "lang"]], "minimum": 50},
        "block_s": 600,
        "min_coverage": 0.8,
        "users_once_per_block": True,
        "discovery": None,
        "metrics": {
            "pii": {"kind": "flags", "flags": ["pii"], "tolerance": 0, "margin": 0.01},
            "cost": {"kind": "cost", "field": "cost_per_1k"},
            "slow": {"kind": "latency", "limit_ms": 2_000, "quantile": 0.9, "modes": ["shadow"]},
        },
    }
    policy = read_policy(json.dumps(document))
    rules = {rule.name: rule for rule in policy.metrics}
    assert policy.crossings == (("lang", "topic"),)
    assert policy.discovery is None
    assert rules["pii"].flags == frozenset({"pii"})
    assert rules["pii"].overall_margin == 0.01
    assert rules["slow"].tolerance == pytest.approx(0.1)
    assert rules["slow"].overall_margin == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "policy=[] must be an object"),
        ({"aplha": 0.1}, "policy.aplha is unknown"),
        ({"alpha": 0.7}, "policy.alpha=0.7 must be a number between 0 and 0.5"),
        ({"alpha": True}, "policy.alpha=True"),
        ({"segments": {"minimum": 0}}, "segments.minimum=0"),
        ({"segments": {"crossings": [["lang"]]}}, "two keys"),
        ({"segments": {"keys": "lang"}}, "must be a list"),
        ({"discovery": {"every": "often"}}, "discovery.every='often'"),
        ({"users_once_per_block": 1}, "must be true or false"),
        ({"metrics": {}}, "metrics is empty"),
        ({"metrics": {"x": {"kind": "vibes"}}}, "metrics.x.kind='vibes' must be one of"),
        ({"metrics": {"x": {"kind": "flags", "margin": "5 %"}}}, "metrics.x.margin='5 %' must be"),
        ({"metrics": {"x": {"kind": "flags", "slack": 2}}}, "metrics.x.slack is unknown"),
        ({"metrics": {"x": {"kind": "score"}}}, "metrics.x.field is missing"),
        ({"metrics": {"x": {"kind": "flags", "modes": ["golden"]}}}, "'golden' must be one of"),
        ({"metrics": {"x": {"kind": "flags", "margin": 0.01}}}, "must be at least tolerance=0.02"),
    ],
)
def test_what_is_wrong_is_named(document: Any, told: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        parse_policy(document)
    assert told in refused.value.message


def test_what_is_no_json_is_no_policy() -> None:
    with pytest.raises(InvalidPolicy, match="not JSON"):
        read_policy("alpha: 0.05")
