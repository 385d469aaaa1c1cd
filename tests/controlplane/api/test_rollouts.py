"""Rollouts over HTTP: who may do what, what a refusal tells, and what is read of one that runs."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from controlplane.api import rollout_reads as read_views
from controlplane.api import rollouts as views
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.policies import save_policy
from inference.queue import Queue
from tests.controlplane.rollouts.world import DOCUMENT, World
from tests.factories import NOW, make_control_token

pytestmark = pytest.mark.django_db

ROLLOUTS = "/api/v1/rollouts"
NEW = {"endpoint": "chat", "candidate": "tiny/2", "policy": "test", "reason": "better at refunds"}
WITH_APPROVAL = {
    **DOCUMENT,
    "steps": [*DOCUMENT["steps"][:1], {"type": "approval"}, *DOCUMENT["steps"][1:]],
}
BAD = 0.7


@pytest.fixture
def world(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> World:
    """``chat`` with tiny/1 live, and tiny/2 to be rolled out; the views' Redis is that of this test."""
    for module in (views, read_views):
        monkeypatch.setattr(module, "connection", lambda: queue)
    save_policy(name="test", document=DOCUMENT, actor="ada", now=NOW)
    return World(queue)


def client_of(role: str) -> Client:
    return Client(headers={"authorization": f"Bearer {make_control_token(role)}"})


@pytest.fixture
def engineer() -> Client:
    return client_of("engineer")


def send(client: Client, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
    response = client.post(path, data=body or {}, content_type="application/json", headers=headers)
    assert response.status_code == status, response.content
    return response.json()


def get(client: Client, path: str, status: int = 200) -> Any:
    response = client.get(path)
    assert response.status_code == status, response.content
    return response.json()


def at(rollout: Rollout, what: str) -> str:
    return f"{ROLLOUTS}/{rollout.key}/{what}"


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


# ------------------------------------------------------------------------------------------------------------- start


def test_a_start_answers_with_the_rollout_and_where_it_is(world: World, engineer: Client) -> None:
    response = engineer.post(ROLLOUTS, data=NEW, content_type="application/json")
    assert response.status_code == 201
    told = response.json()
    assert response.headers["Location"] == f"{ROLLOUTS}/{told['id']}"
    assert (told["state"], told["verdict"], told["policy"], told["candidate"]) == (
        "preparing", "INCONCLUSIVE", "test/1", "tiny/2",
    )  # fmt: skip
    assert (told["created_by"].split()[0], told["reason"]) == ("ada", "better at refunds")
    assert [(step["kind"], step["phase"]) for step in told["steps"]] == [
        ("prepare", "current"), ("shadow", "ahead"), ("canary", "ahead"), ("bake", "ahead"),
    ]  # fmt: skip
    assert get(engineer, response.headers["Location"])["id"] == told["id"]
    assert world.endpoint.rollout == told["id"]


def test_a_repeat_under_a_key_starts_one_rollout(world: World, engineer: Client) -> None:
    told = [send(engineer, ROLLOUTS, NEW, 201, **{"Idempotency-Key": "k"}) for _ in range(2)]
    assert told[0] == told[1]
    assert Rollout.objects.count() == 1
    assert send(engineer, ROLLOUTS, NEW, 409)["code"] == "rollout_active"


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"endpoint": "nope"}, 404, "not_found"),
        ({"candidate": "tiny/9"}, 400, "unknown_version"),
        ({"policy": "nope"}, 400, "unknown_policy"),
        ({"candidate": "tiny/1"}, 409, "candidate_is_live"),
        ({"polcy": "test"}, 400, "invalid"),
        ({"reason": "x" * 501}, 400, "invalid"),
    ],
)
def test_what_cannot_be_started_is_refused_and_nothing_changes(
    world: World, engineer: Client, change: dict[str, Any], status: int, code: str
) -> None:
    assert send(engineer, ROLLOUTS, NEW | change, status)["code"] == code
    assert not Rollout.objects.exists()
    assert world.endpoint.candidate is None


# ------------------------------------------------------------------------------------------------------- who may what


@pytest.mark.parametrize("role", ["viewer", "engineer", "approver"])
def test_viewers_read_engineers_move_and_approvers_approve(world: World, role: str) -> None:
    client = client_of(role)
    rollout = to_canary(world, WITH_APPROVAL)
    assert rollout.state == "awaiting_approval"
    for what in ("timeline", "segments", "copies", "pairs"):
        get(client, at(rollout, what))
    get(client, ROLLOUTS)
    may_move, may_approve = role != "viewer", role == "approver"
    send(client, at(rollout, "approve"), {}, 200 if may_approve else 403)
    send(client, at(rollout, "set-weight"), {"canary_bp": 0}, 200 if may_move else 403)
    send(client, at(rollout, "rollback"), {}, 200 if may_move else 403)
    rollout.refresh_from_db()
    assert rollout.state == ("rolled_back" if may_move else "awaiting_approval")
    assert bool(rollout.approved_by) == may_approve


def test_the_author_cannot_approve_and_another_approver_can(world: World) -> None:
    author, other = client_of("approver"), client_of("approver")
    save_policy(name="test", document=WITH_APPROVAL, actor="ada", now=NOW)
    send(author, ROLLOUTS, NEW, 201)
    Rollout.objects.update(step_index=1, state="awaiting_approval")
    rollout = Rollout.objects.get()
    problem = send(author, at(rollout, "approve"), {}, 403)
    assert problem["code"] == "not_allowed"
    assert "somebody else has to approve" in problem["detail"]
    told = send(other, at(rollout, "approve"), {"reason": "looks right"})
    assert (told["state"], told["approved_by"] == rollout.created_by) == ("progressing", False)


def test_a_promotion_without_a_pass_is_forced_by_an_approver_with_a_reason(world: World) -> None:
    rollout = begin(world)
    path = at(rollout, "promote")
    assert send(client_of("engineer"), path, {"reason": "x"}, 403)["code"] == "not_allowed"
    approver = client_of("approver")
    assert send(approver, path, {}, 422)["code"] == "reason_missing"
    told = send(approver, path, {"reason": "the incumbent is on fire"})
    assert (told["state"], told["is_forced"], world.endpoint.live.name) == (
        "baking",
        True,
        "tiny/2",
    )


# ------------------------------------------------------------------------------------------------------------ actions


def test_pause_resume_and_weight_answer_with_the_new_state(world: World, engineer: Client) -> None:
    rollout = to_canary(world)
    assert send(engineer, at(rollout, "pause"), {"reason": "lunch"})["state"] == "paused"
    problem = send(engineer, at(rollout, "pause"), {}, 409)
    assert (problem["code"], problem["state"]) == ("illegal_transition", "paused")
    assert "resume" in problem["possible"]
    assert send(engineer, at(rollout, "set-weight"), {"canary_bp": 50})["canary_bp"] == 50
    problem = send(engineer, at(rollout, "set-weight"), {"canary_bp": 1001}, 409)
    assert (problem["code"], problem["allowed"]) == ("weight_refused", 1000)
    assert send(engineer, at(rollout, "resume"))["state"] == "progressing"
    assert world.endpoint.canary_bp == 50


@pytest.mark.parametrize(("action", "end"), [("abort", "aborted"), ("rollback", "rolled_back")])
def test_the_ways_out_need_no_body_may_be_repeated_and_can_be_tried_again(
    world: World, engineer: Client, action: str, end: str
) -> None:
    rollout = to_canary(world)
    assert engineer.generic("POST", at(rollout, action)).status_code == 200
    assert send(engineer, at(rollout, action))["state"] == end
    assert (world.endpoint.canary_bp, world.endpoint.rollout) == (0, "")
    if action == "rollback":
        assert send(engineer, at(rollout, "retry"), {}, 409)["code"] == "version_rejected"
    world.lose("tiny/2")
    told = send(engineer, at(rollout, "retry"), {"reason": "once more"}, 201)
    assert (told["attempt"], told["state"], told["id"] == rollout.key) == (2, "preparing", False)


def test_a_rollback_works_with_redis_away(
    world: World, engineer: Client, absent_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = to_canary(world)
    for module in (views, read_views):
        monkeypatch.setattr(module, "connection", lambda: absent_queue)
    assert send(engineer, at(rollout, "rollback"))["state"] == "rolled_back"
    assert get(engineer, at(rollout, "copies"))["arms"][0]["skips"] is None


def test_unknown_rollouts_and_fields_are_named(world: World, engineer: Client) -> None:
    for what in ("timeline", "segments", "copies", "pairs"):
        assert get(engineer, f"{ROLLOUTS}/none/{what}", 404)["code"] == "unknown_rollout"
    assert send(engineer, f"{ROLLOUTS}/none/abort", {}, 404)["code"] == "unknown_rollout"
    rollout = world.start()
    for what in ("pause", "approve", "promote", "abort", "rollback", "retry", "set-weight"):
        client = client_of("approver")
        problem = send(client, at(rollout, what), {"raeson": "x"}, 400)
        assert "raeson" in problem["errors"]


# ------------------------------------------------------------------------------------------------------------ reading


def test_rollouts_are_listed_newest_first_and_narrowed(world: World, engineer: Client) -> None:
    first = world.start()
    send(engineer, at(first, "abort"))
    second = world.start()
    assert [row["id"] for row in get(engineer, ROLLOUTS)["results"]] == [second.key, first.key]
    for query, expected in (
        ("active=true", [second.key]), ("active=0", [first.key]), ("state=aborted", [first.key]),
        ("endpoint=chat", [second.key, first.key]), ("endpoint=other", []),
    ):  # fmt: skip
        rows = get(engineer, f"{ROLLOUTS}?{query}")["results"]
        assert [row["id"] for row in rows] == expected, query
    assert list(get(engineer, f"{ROLLOUTS}?state=lost", 400)["errors"]) == ["state"]
    page = get(engineer, f"{ROLLOUTS}?page_size=1")
    assert [row["id"] for row in get(engineer, page["next"])["results"]] == [first.key]


def test_the_steps_say_how_far_they_are_and_what_is_expected(
    world: World, engineer: Client
) -> None:
    document = {**DOCUMENT, "traffic": [{"segment": {}, "per_hour": 4000}]}
    rollout = to_canary(world, document)
    told = get(engineer, f"{ROLLOUTS}/{rollout.key}")
    prepare, shadow, canary, bake = told["steps"]
    assert (prepare["phase"], shadow["phase"], canary["phase"], bake["phase"]) == (
        "done", "done", "current", "ahead",
    )  # fmt: skip
    assert (shadow["outcome"], shadow["share"], shadow["reached"], shadow["floor"]) == (
        "advance", 1.0, 60, 20,
    )  # fmt: skip
    assert shadow["expected"]["slowest"] == "failure_rate on all traffic"
    assert 0 < shadow["expected"]["hours"] < 1
    assert canary["expected"]["hours"] == pytest.approx(10 / 400)
    assert (canary["reached"], canary["share"]) == (0, 0.0)
    assert told["why"] == "All traffic has 0 of the 10 observations of this step."


def test_segments_are_the_numbers_of_the_gates_the_worst_first(
    world: World, engineer: Client
) -> None:
    traffic = [{"segment": {"lang": "hi"}, "per_hour": 4000}]
    rollout = begin(world, {**DOCUMENT, "traffic": traffic})
    before = get(engineer, at(rollout, "segments"))["results"]
    assert {(row["verdict"], row["n"], row["e_harm"]) for row in before} == {
        ("INCONCLUSIVE", 0, None)
    }
    world.pairs(40, failing=BAD, segments={"lang": "hi"})
    world.pairs(400, segments={"lang": "en"})
    world.settle()
    rollout = world.tick()
    assert rollout.state == "rolled_back"
    worst, overall = get(engineer, at(rollout, "segments"))["results"]
    assert (worst["segment"], worst["verdict"], worst["n"]) == ({"lang": "hi"}, "FAIL", 40)
    assert worst["lower"] > worst["tolerance"]
    assert worst["e_harm"] > 20
    assert (worst["incumbent"], worst["candidate"] > 0.5) == (0.0, True)
    assert overall["segment"] == {}
    narrowed = get(engineer, at(rollout, "segments?verdict=FAIL&metric=failure_rate"))["results"]
    assert narrowed == [worst]
    assert get(engineer, at(rollout, "segments?metric=other"))["results"] == []
    assert "lang=hi" in get(engineer, f"{ROLLOUTS}/{rollout.key}")["why"]


def test_the_timeline_holds_events_and_looks_the_newest_first(
    world: World, engineer: Client
) -> None:
    rollout = to_canary(world)
    send(engineer, at(rollout, "abort"), {"reason": "enough"})
    entries = get(engineer, at(rollout, "timeline"))["results"]
    assert [entry["type"] for entry in entries] == [
        "rollout.aborted", "rollout.step_started", "rollout.look", "rollout.step_started",
        "rollout.created",
    ]  # fmt: skip
    assert (entries[0]["reason"], entries[0]["data"]["trigger"]) == ("enough", "abort")
    look = entries[2]
    assert (look["kind"], look["actor"], look["sequence"]) == ("look", "", None)
    assert (look["data"]["verdict"], look["data"]["failed"]) == ("PASS", [])


def test_pairs_are_paged_narrowed_and_have_texts_only_where_they_are_kept(
    world: World, engineer: Client
) -> None:
    rollout = begin(world)
    world.pairs(3)
    world.pairs(1, candidate_flags=["refusal"], prompt="Refund?", candidate_text="No <b>way</b>.")
    world.pairs(1, failing=1.0)
    world.pairs(2, arm="self", differs=True)
    path = at(rollout, "pairs")
    assert len(get(engineer, path)["results"]) == 7
    failed, flagged = get(engineer, f"{path}?disagree=1")["results"]
    assert (failed["state"], failed["prompt"], failed["candidate_text"]) == ("failed", None, None)
    assert (flagged["candidate_flags"], flagged["candidate_text"]) == (
        ["refusal"],
        "No <b>way</b>.",
    )
    assert len(get(engineer, f"{path}?disagree=false")["results"]) == 5
    assert len(get(engineer, f"{path}?arm=self&state=compared")["results"]) == 2
    assert list(get(engineer, f"{path}?arm=live", 400)["errors"]) == ["arm"]
    page = get(engineer, f"{path}?page_size=4")
    assert len(get(engineer, page["next"])["results"]) == 3
    assert b'"user"' not in engineer.get(path).content


def test_copies_are_counted_by_what_is_known_and_told_by_reason(
    world: World, engineer: Client
) -> None:
    rollout = begin(world)
    world.pairs(3, candidate_engine_s=0.5, prompt_tokens=10, candidate_tokens=20, differs=False)
    world.pairs(1, failing=1.0)
    world.pairs(1, state="unobserved", reason="late")
    world.pairs(2, arm="self", differs=False)
    world.queue.count_skip("chat", rollout.key, "shadow", "busy")
    told = get(engineer, at(rollout, "copies"))
    shadow, own = told["arms"]
    assert (shadow["arm"], shadow["compared"], shadow["failed"]) == ("shadow", 3, 1)
    assert (shadow["unobserved"], shadow["skips"]) == ({"late": 1}, {"busy": 1})
    assert (shadow["coverage"], shadow["engine_s"], shadow["completion_tokens"]) == (0.8, 1.5, 60)
    assert (own["arm"], own["coverage"]) == ("self", 1.0)
    assert told["floor"] == {"different": 0, "n": 2}
    assert told["candidate"] == {"different": 0, "n": 3}
