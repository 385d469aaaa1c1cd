"""What is fixed at a start: segments with enough traffic or declared, limits, expectations; and policies as rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.events.models import Event
from controlplane.rollouts.documents import InvalidPolicy
from controlplane.rollouts.freezing import freeze
from controlplane.rollouts.models import Policy
from controlplane.rollouts.policies import ensure_presets, find_policy, save_policy
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.presets import PRESETS
from tests.controlplane.rollouts.world import DOCUMENT
from tests.factories import NOW, make_log_row

pytestmark = pytest.mark.django_db


def start(**fields: Any) -> Any:
    policy = parse_policy({**DOCUMENT, **fields})
    return freeze(policy=policy, endpoint="chat", incumbent="tiny/1", now=NOW)


def traffic(n: int, *, ago: float = 3600, **fields: Any) -> None:
    for number in range(n):
        at = NOW - timedelta(seconds=ago + number)
        make_log_row(arm="live", finished_at=at, **fields)


def test_segments_are_those_with_enough_traffic_and_those_that_are_declared() -> None:
    traffic(25, tags={"lang": "en"})
    traffic(20, tags={"lang": "hi"})
    traffic(5, tags={"lang": "ta"})
    traffic(30, tags={"lang": "bn"}, version="tiny/7")
    traffic(30, tags={"lang": "te"}, ago=8 * 86_400)
    plan = start().plan
    assert plan["judged"] == ["[]", '[["lang","en"]]', '[["lang","hi"]]']
    assert plan["not_covered"] == [['[["lang","ta"]]', 5]]
    declared = start(traffic=[{"segment": {"lang": "ta"}, "per_hour": 10_000}]).plan
    assert declared["judged"][-1] == '[["lang","ta"]]'
    assert (declared["not_covered"], declared["pooled"]) == ([], {"lang": []})


def test_expectations_come_from_the_traffic_of_the_last_week() -> None:
    traffic(60, tags={"lang": "en"})
    frozen = start()
    assert {(each["step"], each["metric"]) for each in frozen.forecast} == {(0, "failure_rate")}
    assert all(each["hours"] > 0 and each["num"] > 0 for each in frozen.forecast)
    assert frozen.notices == []


def test_without_traffic_that_is_said() -> None:
    frozen = start()
    assert (frozen.plan["judged"], frozen.forecast) == (["[]"], [])
    assert frozen.notices == ["There was no traffic lately to tell how long it takes."]


def test_traffic_that_will_not_do_is_told_before_the_rollout_begins() -> None:
    traffic(2, ago=3600)
    traffic(1, ago=5 * 86_400)
    assert "steps[0]" in start().notices[0]
    assert "hours of this traffic; the deadline is 168 hours" in start().notices[0]


def test_a_changed_document_is_the_next_version_and_the_same_one_is_none() -> None:
    first = save_policy(name="test", document=DOCUMENT, actor="ada", now=NOW)
    again = save_policy(
        name="test", document=dict(reversed(DOCUMENT.items())), actor="bob", now=NOW
    )
    second = save_policy(name="test", document={**DOCUMENT, "block_s": 20}, actor="bob", now=NOW)
    assert (first.pk, str(second), second.created_by) == (again.pk, "test/2", "bob")
    assert find_policy("test", now=NOW) == second
    assert find_policy("test/1", now=NOW) == first
    saved = Event.objects.about("policy:test").in_order()
    assert [event.data["policy"] for event in saved] == ["test/1", "test/2"]


@pytest.mark.parametrize("name", ["", "Brave", "a/b", "x" * 65])
def test_a_policy_has_a_name_that_can_be_written(name: str) -> None:
    with pytest.raises(InvalidPolicy, match="Policy"):
        save_policy(name=name, document=DOCUMENT, actor="ada", now=NOW)
    assert not Policy.objects.exists()


def test_presets_are_saved_once() -> None:
    for _ in range(2):
        ensure_presets(now=NOW)
    assert sorted(str(row) for row in Policy.objects.all()) == sorted(
        f"{name}/1" for name in PRESETS
    )
