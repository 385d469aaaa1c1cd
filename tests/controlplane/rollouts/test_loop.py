"""Rollouts by themselves: ticks move them by what is known, and towards the incumbent when it is not enough."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.endpoints import services as endpoints
from controlplane.events.models import Event
from controlplane.rollouts import loop, services
from controlplane.rollouts.decisions import Move
from controlplane.rollouts.machine import Trigger
from controlplane.rollouts.models import Look, Rollout
from controlplane.rollouts.transitions import By, HoldLost, carry_out
from inference.queue import Queue
from inference.replicas import Member, SlotState, SlotStatus
from tests.controlplane.rollouts.world import DOCUMENT, World, events_of
from tests.factories import make_version

pytestmark = pytest.mark.django_db
GOOD, BAD = 0.0, 0.7


@pytest.fixture
def world(queue: Queue) -> World:
    return World(queue)


def begin(world: World, document: dict[str, Any] | None = None) -> Rollout:
    world.start(document)
    world.hold("tiny/2")
    return world.tick()


def to_baking(world: World, document: dict[str, Any] | None = None) -> Rollout:
    begin(world, document)
    world.pairs(60)
    world.settle()
    world.tick()
    world.requests(60)
    world.requests(12, arm="candidate")
    world.settle()
    return world.tick()


def test_a_good_candidate_goes_through_its_steps_and_is_live_with_the_incumbent_kept(
    world: World,
) -> None:
    world.start()
    assert world.tick().state == "preparing"
    world.hold("tiny/2")
    assert (world.tick().state, world.rollout.step_index) == ("progressing", 0)
    assert (world.endpoint.shadow_bp, world.endpoint.canary_bp) == (5000, 0)
    world.pairs(60)
    world.settle()
    assert (world.tick().step_index, world.endpoint.canary_bp) == (1, 1000)
    world.requests(60)
    world.requests(12, arm="candidate")
    world.settle()
    rollout = world.tick()
    assert (rollout.state, rollout.decision) == ("baking", "promote")
    assert world.endpoint.live.name == "tiny/2"
    assert world.endpoint.previous is not None
    assert world.endpoint.previous.name == "tiny/1"
    world.wait(60)
    assert world.tick().state == "promoted"
    assert world.endpoint.rollout == ""
    assert events_of(world.rollout) == [
        "created", "step_started", "step_started", "promoted", "succeeded",
    ]  # fmt: skip
    steps = world.rollout.steps.order_by("index")
    assert [(step.kind, step.outcome) for step in steps] == [
        ("prepare", "ready"), ("shadow", "advance"), ("canary", "pass"), ("bake", "baked"),
    ]  # fmt: skip


def test_without_data_nothing_is_promoted_and_the_deadline_leads_to_the_incumbent(
    world: World,
) -> None:
    begin(world)
    for _ in range(3):
        world.wait(86_400)
        assert (world.tick().state, world.endpoint.canary_bp) == ("progressing", 0)
    assert "has 0 of the 20 observations" in world.rollout.why
    world.wait(5 * 86_400)
    rollout = world.tick()
    assert (rollout.state, world.endpoint.live.name, world.endpoint.candidate) == (
        "expired", "tiny/1", None,
    )  # fmt: skip
    assert not world.endpoint.rejections.exists()


def test_harm_in_one_language_rolls_back_and_names_it_where_the_mean_would_have_passed(
    world: World,
) -> None:
    document = {**DOCUMENT, "traffic": [{"segment": {"lang": "hi"}, "per_hour": 4000}]}
    begin(world, document)
    world.pairs(40, failing=BAD, segments={"lang": "hi"})
    world.pairs(1200, failing=GOOD, segments={"lang": "en"})
    world.settle()
    rollout = world.tick()
    assert (rollout.state, world.endpoint.candidate) == ("rolled_back", None)
    assert "lang=hi" in rollout.verdict_reason
    event = Event.objects.get(type="rollout.rolled_back")
    assert [gate["name"] for gate in event.data["failed"]] == ["lang=hi"]
    overall = next(r for r in rollout.looks.get().results if r["segment"] == "[]")
    assert overall["verdict"] == "PASS"
    rejected = {rejection.version.name for rejection in world.endpoint.rejections.all()}
    assert rejected == {"tiny/2"}


def test_a_gate_that_is_not_critical_holds_and_somebody_may_go_on_but_not_promote_by_it(
    world: World,
) -> None:
    document = {
        **DOCUMENT,
        "metrics": {
            **DOCUMENT["metrics"],
            "refusals": {
                "kind": "flags", "flags": ["refusal"], "modes": ["shadow"], "critical": False,
                "minimum": 20,
            },
        },
        "steps": [{**DOCUMENT["steps"][0], "until": "floor"}, *DOCUMENT["steps"][1:2],
                  {"type": "canary", "bp": 2000, "floor": 10, "for_s": 0}],
    }  # fmt: skip
    begin(world, document)
    world.pairs(100, candidate_flags=["refusal"])
    world.settle()
    rollout = world.tick()
    assert (rollout.state, rollout.hold, world.endpoint.shadow_bp) == ("paused", "gate", 5000)
    with pytest.raises(services.ReasonMissing):
        services.resume(**world.by())
    resumed = services.resume(**world.by(), reason="it refuses what it should")
    assert resumed.overrides == ["refusals on all traffic"]
    world.pairs(20, candidate_flags=["refusal"])
    world.settle()
    assert (world.tick().step_index, world.rollout.state) == (1, "paused")
    assert world.rollout.decision == "inconclusive"
    with pytest.raises(services.NotAllowed):
        services.promote(**world.by("ada"), role="approver", reason="I want it")


def test_a_candidate_that_cannot_be_loaded_fails_with_its_reason(world: World) -> None:
    world.start()
    resident = next(each for each in world.queue.read_desired() or [] if each.version == "tiny/2")
    member = Member(world.queue, "slot-x", lease_ms=60_000)
    member.status = SlotStatus("slot-x", "chat", "tiny/2", SlotState.LOADING)
    member.renew()
    member.begin_load(resident, num_tries=2)
    assert world.tick().state == "preparing"
    member.fail_load(member.begin_load(resident, num_tries=2), "the golden probe gave NaN")
    rollout = world.tick()
    assert (rollout.state, world.endpoint.candidate) == ("failed", None)
    event = Event.objects.get(type="rollout.failed")
    assert "tiny/2 could not be loaded: the golden probe gave NaN" in event.reason


def test_a_candidate_that_is_never_ready_fails_in_time(world: World) -> None:
    world.start()
    world.wait(899)
    assert world.tick().state == "preparing"
    world.wait(1)
    assert world.tick().state == "failed"


def test_a_candidate_whose_process_is_gone_fails_and_one_that_comes_back_goes_on(
    world: World,
) -> None:
    begin(world)
    world.lose("tiny/2")
    assert world.tick().state == "progressing"
    world.wait(29)
    world.hold("tiny/2")
    assert (world.tick().state, world.rollout.unready_since) == ("progressing", None)
    world.lose("tiny/2")
    world.tick()
    world.wait(30)
    rollout = world.tick()
    assert (rollout.state, world.endpoint.live.name) == ("failed", "tiny/1")
    assert (
        "no slot has held tiny/2 ready for 30 s" in Event.objects.get(type="rollout.failed").reason
    )


def test_a_candidate_that_does_nothing_but_fail_is_not_waited_for(world: World) -> None:
    begin(world)
    world.pairs(19, failing=1.0)
    assert world.tick().state == "progressing"
    world.pairs(1, failing=1.0)
    assert world.tick().state == "failed"


def test_while_redis_is_away_nothing_is_called_broken(world: World, absent_queue: Queue) -> None:
    begin(world)
    for _ in range(3):
        loop.tick(queue=absent_queue, now=world.now)
        world.wait(60)
    assert (world.rollout.state, world.rollout.unready_since) == ("progressing", None)


@pytest.mark.parametrize("move", ["promote", "rollback"])
def test_a_move_by_hand_ends_the_rollout_at_once_and_stands(world: World, move: str) -> None:
    begin(world)
    by: dict[str, Any] = {"actor": "eve", "now": world.now, "queue": world.queue}
    world.report()
    if move == "promote":
        endpoints.promote(name="chat", version="tiny/2", reason="by hand", **by)
    else:
        world.hold("tiny/3")
        make_version()
        endpoints.rollback(name="chat", to_version="tiny/3", force=True, **by)
    endpoint = world.endpoint
    assert (endpoint.candidate, endpoint.shadow_bp, endpoint.rollout) == (None, 0, "")
    rollout = world.tick()
    assert (rollout.state, world.endpoint.generation) == ("superseded", endpoint.generation)
    assert world.endpoint.live.name == ("tiny/2" if move == "promote" else "tiny/3")


def test_a_live_candidate_that_fails_requests_is_taken_back(world: World) -> None:
    to_baking(world)
    world.wait(10)
    world.requests(300)
    assert world.tick().state == "baking"
    world.requests(60, failing=1.0)
    world.wait(1)
    world.requests(1)
    rollout = world.tick()
    assert (rollout.state, world.endpoint.live.name) == ("rolled_back", "tiny/1")
    assert (
        "60 of 361 requests since the promotion have no answer"
        in Event.objects.filter(type="rollout.rolled_back").get().reason
    )


def test_a_live_candidate_whose_process_is_gone_is_taken_back(world: World) -> None:
    to_baking(world)
    world.lose("tiny/2")
    world.tick()
    world.wait(30)
    assert (world.tick().state, world.endpoint.live.name) == ("failed", "tiny/1")


def test_what_is_seen_after_a_promotion_takes_no_pass_from_it(world: World) -> None:
    bake = {"type": "bake", "for_s": 3600}
    to_baking(world, {**DOCUMENT, "steps": [*DOCUMENT["steps"][:2], bake]})
    world.pairs(400, state="unobserved", candidate_outcome="")  # coverage is too low by now
    world.settle()
    rollout = world.tick()
    assert (rollout.state, rollout.decision) == ("baking", "promote")
    assert rollout.looks.order_by("-number")[0].decision == "inconclusive"


def test_a_promotion_by_hand_in_the_middle_of_a_move_is_not_taken_for_a_pass(world: World) -> None:
    begin(world)
    stale = world.rollout
    world.report()
    endpoints.rollback(
        name="chat", to_version="tiny/2", force=True, actor="eve", now=world.now, queue=world.queue
    )
    forced = Move(Trigger.FORCE, "late", step_index=2)
    with pytest.raises(HoldLost, match="was moved by hand"):
        carry_out(rollout=stale, move=forced, by=By("bob", world.now), queue=world.queue)
    assert world.rollout.state == "progressing"


def test_a_policy_that_only_shadows_ends_without_a_promotion(world: World) -> None:
    begin(world, {**DOCUMENT, "steps": DOCUMENT["steps"][:1]})
    world.pairs(60)
    world.settle()
    rollout = world.tick()
    assert (rollout.state, rollout.decision, world.endpoint.live.name) == (
        "completed", "promote", "tiny/1",
    )  # fmt: skip


def test_users_who_are_not_shared_as_intended_forbid_a_promotion(world: World) -> None:
    begin(world)
    world.pairs(60)
    world.settle()
    world.tick()
    for number in range(400):
        world.requests(1, user=f"u{number}")
    world.requests(12, arm="candidate")
    world.settle()
    rollout = world.tick()
    assert (rollout.state, rollout.verdict, rollout.arms) == (
        "progressing", "ERROR", {"1000": [400, 0]},
    )  # fmt: skip
    assert "should have met 40" in rollout.why


def test_copies_that_are_not_run_are_an_event_once_and_forbid_a_pass(world: World) -> None:
    begin(world)
    for _ in range(2):
        world.pairs(60)
        world.pairs(90, state="unobserved", candidate_outcome="", reason="displaced")
        world.settle()
        world.tick()
    assert (world.rollout.state, world.rollout.decision) == ("progressing", "inconclusive")
    event = Event.objects.get(type="rollout.coverage_low")
    assert "coverage: 60 of 150 copies were compared" in event.reason
    assert "120 of 300" in world.rollout.looks.order_by("-number")[0].notices[0]


def test_looks_that_say_the_same_are_one_row_and_every_other_is_kept(world: World) -> None:
    begin(world)
    for _ in range(4):
        world.pairs(15)
        world.settle()
        world.tick()
    looks = list(Look.objects.filter(rollout=world.rollout).order_by("number"))
    assert world.rollout.num_looks == 4
    assert [look.decision for look in looks] == ["inconclusive", "promote"]
    assert looks[-1].results[0]["n"] == 60
    assert looks[0].since < looks[0].at or looks[0].number == 1


def test_a_rollout_that_cannot_be_moved_holds_up_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = begin(world)
    Rollout.objects.filter(pk=rollout.pk).update(document={"steps": "lost"})
    world.tick()
    assert "rollout waits" in caplog.text


def test_a_tick_that_comes_again_changes_nothing(world: World) -> None:
    begin(world)
    world.pairs(60)
    world.settle()
    first = world.tick()
    again = world.tick()
    assert (again.version, again.num_looks, again.sealed_block) == (
        first.version, first.num_looks, first.sealed_block,
    )  # fmt: skip
