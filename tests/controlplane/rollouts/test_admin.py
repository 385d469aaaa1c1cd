"""The pages of rollouts: what they show, who may press which button, and what pressing it does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from controlplane.endpoints import admin as endpoint_pages
from controlplane.endpoints import desk as endpoint_desk
from controlplane.events.models import Event
from controlplane.rollouts import admin as pages
from controlplane.rollouts import desk
from controlplane.rollouts.models import Rollout
from inference.queue import Queue
from tests.controlplane.rollouts.world import DOCUMENT, World

pytestmark = pytest.mark.django_db

WITH_APPROVAL = {
    **DOCUMENT,
    "steps": [*DOCUMENT["steps"][:1], {"type": "approval"}, *DOCUMENT["steps"][1:]],
}
MOVES = ("rollback", "abort", "pause", "resume", "approve", "weight", "promote", "retry")
BAD = 0.7


@pytest.fixture
def world(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> World:
    """``chat`` with tiny/1 live, and tiny/2 to be rolled out."""
    connect(queue, monkeypatch)
    return World(queue)


def connect(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pages, desk, endpoint_pages, endpoint_desk):
        monkeypatch.setattr(module, "connection", lambda: queue)


def log_in(role: str, name: str = "") -> Client:
    """A browser of a person in the group of ``role``."""
    user = User.objects.create_user(name or role, password="x", is_staff=True)
    user.groups.add(Group.objects.get(name=role))
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def at(rollout: Rollout, what: str = "change", *more: int) -> str:
    return reverse(f"admin:rollouts_rollout_{what}", args=[rollout.pk, *more])


def read(client: Client, path: str, status: int = 200) -> str:
    response = client.get(path)
    assert response.status_code == status
    return response.content.decode()


def send(client: Client, path: str, **fields: Any) -> str:
    """The page on which one ends."""
    response = client.post(path, fields, follow=True)
    assert response.status_code == 200
    return response.content.decode()


def begin(world: World, document: dict[str, Any] = DOCUMENT) -> Rollout:
    """A rollout by ada at its first step."""
    world.start(document)
    world.hold("tiny/2")
    return world.tick()


def to_canary(world: World, document: dict[str, Any] = DOCUMENT) -> Rollout:
    """One whose candidate has passed its gate; with DOCUMENT it has a tenth of the traffic."""
    begin(world, document)
    world.pairs(60)
    world.settle()
    return world.tick()


def fail_in_hindi(world: World, **fields: Any) -> Rollout:
    """One that was rolled back, because the candidate has no answer in one language."""
    begin(world, {**DOCUMENT, "traffic": [{"segment": {"lang": "hi"}, "per_hour": 4000}]})
    world.pairs(40, failing=BAD, segments={"lang": "hi"}, **fields)
    world.pairs(400, segments={"lang": "en"})
    world.settle()
    return world.tick()


def words_of(page: str) -> str:
    """The text of a page with single blanks."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def buttons(page: str, rollout: Rollout) -> list[str]:
    """The moves that the page offers."""
    return [move for move in MOVES if f'"{at(rollout, move)}"' in page]


# ---------------------------------------------------------------------------------------------------------- reading


def test_the_page_says_in_one_sentence_why_it_waits_and_shows_steps_and_gates(
    world: World,
) -> None:
    rollout = to_canary(world, {**DOCUMENT, "traffic": [{"segment": {}, "per_hour": 4000}]})
    text = words_of(read(log_in("viewer"), at(rollout)))
    for shown in (
        "▸ progressing", "All traffic has 0 of the 10 observations of this step.",
        "1. shadow of 50%", "60 of 20 on all traffic", "2. canary at 10 %", "✓ done", "▸ now", "○ ahead",
        "for failure_rate on all traffic", "✓ pass", "failure_rate all traffic", "60 +0.0",
        "tolerance +5.0", "answered by the candidate",
    ):  # fmt: skip
        assert shown in text, shown


def test_a_failure_names_the_segment_the_numbers_and_the_worst_pairs(world: World) -> None:
    rollout = fail_in_hindi(world)
    text = words_of(read(log_in("viewer"), at(rollout)))
    assert rollout.state == "rolled_back"
    for shown in (
        "↩ rolled back", "✗ ended here", "failure_rate on lang=hi:", "✗ fail", "lang=hi",
        "no answer:", "The texts of this pair are not kept",
    ):  # fmt: skip
        assert shown in text, shown


def test_texts_of_pairs_are_shown_side_by_side_and_never_as_markup(world: World) -> None:
    rollout = begin(world)
    world.pairs(
        1, prompt="<script>alert(1)</script>", incumbent_text="It is <b>refunded</b>.",
        candidate_text="I cannot.", candidate_flags=["refusal"],
    )  # fmt: skip
    page = read(log_in("viewer"), at(rollout))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "It is &lt;b&gt;refunded&lt;/b&gt;." in page
    assert "I cannot." in page
    assert "refusal" in page


def test_copies_floor_cost_and_skip_reasons_are_told(world: World) -> None:
    rollout = begin(world)
    world.pairs(3, candidate_engine_s=0.5, differs=True)
    world.pairs(2, arm="self", differs=False)
    world.queue.count_skip("chat", rollout.key, "shadow", "busy")
    text = words_of(read(log_in("viewer"), at(rollout)))
    for shown in (
        "1 the live version was busy", "1.5 s",
        "Of 2 requests that the incumbent answered twice, 0 answers differ, as it must be",
        "3 of 3 answers of the candidate differ",
    ):  # fmt: skip
        assert shown in text, shown


def test_with_redis_away_the_page_is_shown_and_says_so(
    world: World, absent_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = begin(world)
    world.pairs(1)
    connect(absent_queue, monkeypatch)
    client = log_in("engineer")
    text = read(client, at(rollout))
    assert "Redis is away" in text
    assert "so nobody knows" in text
    send(client, at(rollout, "rollback"))
    assert world.rollout.state == "rolled_back"


def test_only_what_runs_renews_itself(world: World) -> None:
    rollout = begin(world)
    client = log_in("engineer")
    assert "renew.js" in read(client, at(rollout))
    page = send(client, at(rollout, "abort"))
    assert "renew.js" not in page
    assert "data-renew" not in page


def test_the_list_shows_where_each_stands(world: World) -> None:
    rollout = fail_in_hindi(world)
    listed = reverse("admin:rollouts_rollout_changelist")
    client = log_in("viewer")
    text = words_of(read(client, listed))
    assert "↩ rolled back" in text
    assert "✗ fail" in text
    assert rollout.key in read(client, f"{listed}?state=rolled_back")
    assert rollout.key not in read(client, f"{listed}?state=active")


# ---------------------------------------------------------------------------------------------------------- buttons


def test_buttons_follow_state_role_and_authorship(world: World) -> None:
    rollout = to_canary(world, WITH_APPROVAL)
    assert rollout.state == "awaiting_approval"
    for role, name, expected in (
        ("viewer", "", []),
        ("engineer", "", ["rollback", "abort"]),
        ("approver", "", ["rollback", "abort", "approve", "promote"]),
        ("approver", "ada", ["rollback", "abort"]),
    ):
        client = log_in(role, name)
        page = read(client, at(rollout))
        assert buttons(page, rollout) == expected, (role, name)
        if name == "ada":
            assert "You have started it, so somebody else has to approve it." in page


def test_a_viewer_cannot_press_anything(world: World) -> None:
    rollout = begin(world)
    client = log_in("viewer")
    for move in MOVES:
        assert client.get(at(rollout, move)).status_code == 403
        assert client.post(at(rollout, move), {}).status_code == 403
    assert client.post(at(rollout, "reason", 1), {"reason": "x"}).status_code == 403
    assert Event.objects.about(rollout.subject).count() == 2


def test_one_press_rolls_back_and_the_reason_is_added_afterwards(world: World) -> None:
    rollout = to_canary(world)
    client = log_in("engineer")
    text = words_of(send(client, at(rollout, "rollback")))
    assert f"Rollout {rollout.key} is rolled back. tiny/2 has 0 % of the traffic." in text
    assert (world.rollout.state, world.endpoint.canary_bp) == ("rolled_back", 0)
    event = Event.objects.about(rollout.subject).get(type="rollout.rolled_back")
    assert event.actor == "engineer"
    path = at(rollout, "reason", event.sequence)
    assert path in read(client, at(rollout))
    page = send(client, path, reason="It spoke of trains only.")
    assert "It spoke of trains only." in page
    assert "added by engineer" in words_of(page)
    assert path not in page


def test_looking_at_a_move_does_nothing(world: World) -> None:
    rollout = to_canary(world)
    client = log_in("approver")
    for move in MOVES:
        read(client, at(rollout, move))
    assert (world.rollout.version, world.rollout.state) == (rollout.version, "progressing")


def test_pause_resume_and_share_act_and_refuse_what_is_too_much(world: World) -> None:
    rollout = to_canary(world)
    client = log_in("engineer")
    assert "‖ paused" in send(client, at(rollout, "pause"))
    assert buttons(read(client, at(rollout)), rollout) == [
        "rollback", "abort", "resume", "weight", "promote",
    ]  # fmt: skip
    assert "less than or equal to 10" in send(client, at(rollout, "weight"), percent="11")
    send(client, at(rollout, "weight"), percent="2.5", reason="slowly")
    assert world.endpoint.canary_bp == 250
    assert "▸ progressing" in send(client, at(rollout, "resume"))
    assert "knows no resume" in send(client, at(rollout, "resume"))


def test_a_forced_promotion_asks_for_a_reason(world: World) -> None:
    rollout = begin(world)
    client = log_in("approver")
    assert "The gates have not passed it." in read(client, at(rollout, "promote"))
    assert "This field is required" in send(client, at(rollout, "promote"))
    assert "live, watched" in send(
        client, at(rollout, "promote"), reason="the other one is on fire"
    )
    assert (world.rollout.is_forced, world.endpoint.live.name) == (True, "tiny/2")


def test_a_rollback_to_an_incumbent_that_is_not_ready_says_so_and_is_pressed_all_the_same(
    world: World,
) -> None:
    rollout = begin(world)
    client = log_in("approver")
    send(client, at(rollout, "promote"), reason="now")
    world.lose("tiny/1")
    page = read(client, at(rollout))
    assert "Roll back all the same" in words_of(page)
    assert "No slot holds tiny/1 ready." in page
    send(client, at(rollout, "rollback"))
    assert world.rollout.state == "baking"
    send(client, at(rollout, "rollback"), force="on")
    assert (world.rollout.state, world.endpoint.live.name) == ("rolled_back", "tiny/1")


def test_what_was_rolled_back_is_tried_again_with_a_reason(world: World) -> None:
    rollout = to_canary(world)
    client = log_in("engineer")
    send(client, at(rollout, "rollback"))
    assert buttons(read(client, at(rollout)), rollout) == ["retry"]
    assert "give a reason" in send(client, at(rollout, "retry"))
    world.lose("tiny/2")
    send(client, at(rollout, "retry"), reason="the template is mended")
    assert (world.rollout.attempt, world.rollout.state) == (2, "preparing")


# ---------------------------------------------------------------------------------------- on the page of an endpoint


def test_a_rollout_is_started_on_the_page_of_its_endpoint(world: World) -> None:
    client = log_in("engineer")
    endpoint = world.endpoint
    page = reverse("admin:endpoints_endpoint_change", args=[endpoint.pk])
    start = reverse("admin:endpoints_endpoint_rollout", args=[endpoint.pk])
    assert start in read(client, page)
    form = read(client, start)
    for shown in ("tiny/2", "careful", "score of 10% → shadow of 20%"):
        assert shown in form
    text = words_of(send(client, start, candidate="tiny/2", policy="quick", reason="smaller"))
    rollout = world.rollout
    assert f"Rollout {rollout.key} has begun." in text
    assert (rollout.created_by, rollout.reason, str(rollout.policy)) == (
        "engineer", "smaller", "quick/1",
    )  # fmt: skip
    after = read(client, page)
    assert start not in after
    assert at(rollout) in after
    assert "is active on endpoint" in send(client, start, candidate="tiny/2", policy="quick")
    assert Rollout.objects.count() == 1


def test_a_rejected_version_is_marked_and_needs_to_be_asked_for(world: World) -> None:
    rollout = to_canary(world)
    client = log_in("engineer")
    send(client, at(rollout, "rollback"))
    world.lose("tiny/2")
    start = reverse("admin:endpoints_endpoint_rollout", args=[world.endpoint.pk])
    assert "tiny/2 (rejected here)" in read(client, start)
    fields = {"candidate": "tiny/2", "policy": "test"}
    assert "was taken back on endpoint" in send(client, start, **fields)
    send(client, start, **fields, takes_rejected="on", reason="once more")
    assert world.rollout.state == "preparing"


def test_a_viewer_cannot_start(world: World) -> None:
    client = log_in("viewer")
    start = reverse("admin:endpoints_endpoint_rollout", args=[world.endpoint.pk])
    page = reverse("admin:endpoints_endpoint_change", args=[world.endpoint.pk])
    assert start not in read(client, page)
    read(client, start, 403)
    assert client.post(start, {"candidate": "tiny/2", "policy": "quick"}).status_code == 403
    assert not Rollout.objects.exists()
