"""The pages of policies: a form for the whole document, with every complaint beside the field that it is about."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.rollouts.models import Policy
from controlplane.rollouts.policies import save_policy
from controlplane.rollouts.presets import PRESETS
from tests.controlplane.rollouts.test_admin import log_in, read, send, words_of
from tests.controlplane.rollouts.world import DOCUMENT
from tests.factories import NOW

pytestmark = pytest.mark.django_db

ADD = "/admin/rollouts/policy/add/"
RICH: dict[str, Any] = {
    **DOCUMENT,
    "alpha": 0.02,
    "segments": {"keys": ["lang", "topic"], "minimum": 20, "crossings": [["lang", "topic"]]},
    "discovery": {"every": 500, "minimum": 20},
    "users_once_per_block": True,
    "promote": True,
    "in_flight": "cut",
    "standby_s": 60,
    "traffic": [{"segment": {"lang": "hi"}, "per_hour": 4000, "loss_rate": 0.01}],
    "metrics": {
        **DOCUMENT["metrics"],
        "tone": {"kind": "flags", "flags": ["refusal", "empty"], "modes": ["shadow"], "segments": []},
        "p99": {"kind": "latency", "quantile": 0.95, "slack": 1.5, "critical": False},
    },
}  # fmt: skip


class Fields(HTMLParser):
    """What a browser would send of the form that is shown, without any button."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._select = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "select":
            self._select = name
        elif tag == "option" and "selected" in given:
            self.values[self._select] = given.get("value") or ""
        elif tag == "input" and name and given.get("type") in ("checkbox", "radio"):
            if "checked" in given:
                self.values[name] = given.get("value") or "on"
        elif tag == "input" and name:
            self.values[name] = given.get("value") or ""


def fields_of(client: Client, start: str) -> dict[str, str]:
    """The form that begins with ``start``."""
    return Fields(read(client, f"{ADD}?from={start}")).values


def beside(page: str, name: str) -> str:
    """What is said beside the field ``name``."""
    after = page.split(f'name="{name}"', 1)[1]
    errors = re.search(r"<ul>(.*?)</ul>", after.split("form-row", 1)[0][:4000], re.DOTALL)
    following = after.find('name="', 1)
    if errors is None or (following > 0 and after.find("<ul>") > following):
        return ""
    return words_of(errors[1])


@pytest.mark.parametrize("start", sorted(PRESETS))
def test_a_preset_that_is_saved_as_it_is_shown_has_its_document(
    start: str,
) -> None:
    client = log_in("engineer")
    fields = fields_of(client, start)
    assert fields["name"] == ""
    send(client, f"{ADD}?from={start}", **fields | {"name": "mine"})
    assert Policy.objects.get(name="mine").document == PRESETS[start]


def test_every_field_of_a_document_is_shown_and_comes_back(db: None) -> None:
    save_policy(name="rich", document=RICH, actor="ada", now=NOW, description="as agreed")
    client = log_in("engineer")
    fields = fields_of(client, "rich/1")
    assert (fields["name"], fields["description"]) == ("rich", "as agreed")
    assert "says that already" in send(client, f"{ADD}?from=rich/1", **fields)
    text = send(client, f"{ADD}?from=rich/1", **fields | {"alpha": "0.01"})
    assert "Policy rich/2 is saved." in words_of(text)
    assert Policy.objects.newest("rich")[0].document == RICH | {"alpha": 0.01}
    assert Policy.objects.newest("rich")[1].document == RICH


def test_steps_are_ordered_taken_out_and_added() -> None:
    save_policy(name="ours", document=DOCUMENT, actor="ada", now=NOW)
    client = log_in("engineer")
    fields = fields_of(client, "ours") | {
        "steps-0-share": "0.25", "steps-2-DELETE": "on", "steps-3-type": "pause", "steps-3-for_s": "0",
        "steps-3-ORDER": "1", "steps-0-ORDER": "2",
    }  # fmt: skip
    send(client, f"{ADD}?from=ours", **fields)
    assert Policy.objects.newest("ours")[0].document["steps"] == [
        {"type": "pause", "for_s": 0}, {"type": "shadow", "share": 0.25, "floor": 20}, DOCUMENT["steps"][1],
    ]  # fmt: skip
    page = send(client, f"{ADD}?from=ours", **fields | {"more": "steps"})
    assert 'name="steps-4-type"' in page
    assert Policy.objects.newest("ours").count() == 2


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"alpha": "2"}, "alpha", "policy.alpha=2 must be a number between 0 and 0.5."),
        ({"alpha": "much"}, "alpha", "'much' is no number."),
        ({"segment_keys": "colour"}, "segment_keys", "segments.keys: 'colour' is no key of segments"),
        ({"segment_minimum": "0"}, "segment_minimum", "segments.minimum=0 must be a whole number"),
        ({"steps-1-bp": ""}, "steps-1-bp", "steps[1].bp is missing: say how many"),
        ({"steps-0-bp": "5"}, "steps-0-bp", "steps[0].bp is unknown: use"),
        ({"metrics-0-modes": "score"}, "metrics-0-modes", "which no step brings"),
        ({"metrics-0-flags": "rude"}, "metrics-0-flags", "'rude' is no flag: use"),
        ({"metrics-0-name": ""}, "metrics-0-name", "Give the gate a name that no other has."),
        ({"traffic-0-segment": "lang", "traffic-0-per_hour": "5"}, "traffic-0-segment", "must be key=value"),
        ({"name": "Our policy"}, "name", "Use lower-case letters"),
    ],
)  # fmt: skip
def test_a_complaint_stands_beside_its_field_and_nothing_is_saved(
    change: dict[str, str], field: str, told: str
) -> None:
    save_policy(name="ours", document=DOCUMENT, actor="ada", now=NOW)
    client = log_in("engineer")
    page = send(client, f"{ADD}?from=ours", **fields_of(client, "ours") | change)
    assert told in beside(page, field).replace("&#x27;", "'")
    assert Policy.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps-1-bp": "500", "steps-3-type": "canary", "steps-3-bp": "100", "steps-3-ORDER": "2"}, "must rise"),
        ({"traffic-0-segment": "lang=hi", "traffic-0-per_hour": "0.1"}, "the deadline is 168 hours"),
        ({"metrics-0-not_critical": "on"}, "none is critical"),
        ({"metrics-0-margin": "0.01"}, "could pass and fail at once"),
    ],
)  # fmt: skip
def test_a_complaint_about_several_fields_stands_above_them(
    change: dict[str, str], told: str
) -> None:
    save_policy(name="ours", document=DOCUMENT, actor="ada", now=NOW)
    client = log_in("engineer")
    page = send(client, f"{ADD}?from=ours", **fields_of(client, "ours") | change)
    noted = re.findall(r'<div class="errornote.*?</div>', page, re.DOTALL)
    assert any(told in words_of(each) for each in noted), noted
    assert Policy.objects.count() == 1


def test_a_version_is_shown_in_words_and_never_changed() -> None:
    policy = save_policy(name="ours", document=DOCUMENT, actor="ada", now=NOW)
    path = reverse("admin:rollouts_policy_change", args=[policy.pk])
    engineer, viewer = log_in("engineer"), log_in("viewer")
    page = read(engineer, path)
    for shown in ("1. shadow of 50%", "failure_rate", "rolls back", "No rollout."):
        assert shown in words_of(page)
    assert f"{ADD}?from=ours/1" in page
    assert f"{ADD}?from=ours/1" not in read(viewer, path)
    assert engineer.post(path, {}).status_code == 405
    read(viewer, ADD, 403)
    assert viewer.post(ADD, {}).status_code == 403
    read(engineer, f"{ADD}?from=nothing", 404)
