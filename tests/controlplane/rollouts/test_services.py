"""What people do with rollouts: who may, what is refused and why, and what is true afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, transaction

from controlplane.endpoints import capacity
from controlplane.endpoints import services as endpoints
from controlplane.endpoints.moves import (
    HeldByRollout,
    Settings,
    VersionNotResident,
)
from controlplane.endpoints.services import ReadinessUnknown
from controlplane.events.models import Event
from controlplane.rollouts import services, starting
from controlplane.rollouts.machine import IllegalTransition
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.policies import UnknownPolicy
from inference.planner.memory import Footprint
from inference.queue import Queue
from tests.controlplane.rollouts.world import (
    DOCUMENT,
    WITH_APPROVAL,
    World,
    begin,
    to_canary,
)
from tests.factories import make_version

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(queue: Queue) -> World:
    return World(queue)


# ------------------------------------------------------------------------------------------------------------ start


def test_a_start_makes_the_candidate_one_without_traffic_and_freezes_the_policy(
    world: World,
) -> None:
    rollout = world.start(reason="better at refunds")
    endpoint = world.endpoint
    assert endpoint.candidate is not None
    assert (endpoint.candidate.name, endpoint.canary_bp, endpoint.rollout, endpoint.salt) == (
        "tiny/2", 0, rollout.key, rollout.key,
    )  # fmt: skip
    assert (rollout.state, rollout.incumbent.name, str(rollout.policy)) == (
        "preparing", "tiny/1", "test/1",
    )  # fmt: skip
    assert rollout.document == {**DOCUMENT, "discovery": None}
    route = world.queue.read_route("chat")
    assert route is not None
    assert (route.rollout, route.candidate) == (rollout.key, "tiny/2")
    event = Event.objects.about(rollout.subject).get()
    assert (event.type, event.actor, event.reason) == (
        "rollout.created",
        "ada",
        "better at refunds",
    )


def test_an_endpoint_has_one_rollout_at_a_time(world: World) -> None:
    first = world.start()
    make_version()
    with pytest.raises(starting.RolloutActive, match=f"Rollout {first.key} is active"):
        world.start(candidate="tiny/3")
    assert Rollout.objects.count() == 1


def test_the_database_refuses_a_second_active_rollout(world: World) -> None:
    rollout = world.start()
    rollout.pk, rollout.key = None, "other"
    with pytest.raises(IntegrityError), transaction.atomic():
        rollout.save(force_insert=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "promoted", "promoted_at": None},
        {"state": "baking", "promoted_at": "2026-03-01T12:00Z"},
        {"state": "aborted"},
        {"state": "aborted", "ended_at": "2026-03-01T12:00Z", "canary_bp": 1},
        {"canary_bp": 10_001},
        {"state": "lost"},
    ],
)
def test_the_database_refuses_a_rollout_that_cannot_be(
    world: World, fields: dict[str, Any]
) -> None:
    rollout = world.start()
    with pytest.raises(IntegrityError), transaction.atomic():
        Rollout.objects.filter(pk=rollout.pk).update(**fields)


def test_what_memory_does_not_hold_is_refused_with_the_numbers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = capacity.Fit("m/2", Footprint(3 * 2**30, 2**30, 2**28), 2**30, 0, ())
    monkeypatch.setattr(capacity, "fits_as_candidate", lambda *_, **__: fit)
    with pytest.raises(capacity.DoesNotFit, match="needs 4,352 MiB") as refused:
        world.start()
    assert refused.value.details["fit"]["needed_bytes"] == 4352 * 2**20
    assert not Rollout.objects.exists()


def test_what_does_not_fit_is_refused_before_anything_changes(world: World) -> None:
    with pytest.raises(capacity.DoesNotFit, match="cannot be loaded for endpoint 'chat': no room"):
        world.start(fits=lambda room: f"no room beside {len(room.states)} endpoint")
    assert not Rollout.objects.exists()
    assert world.endpoint.candidate is None


def test_with_redis_away_nobody_knows_whether_it_fits(world: World, absent_queue: Queue) -> None:
    with pytest.raises(ReadinessUnknown, match="nobody knows whether a slot is left for tiny/2"):
        world.start(queue=absent_queue)
    assert not Rollout.objects.exists()


def test_a_version_that_was_taken_back_needs_its_name_and_a_reason(world: World) -> None:
    begin(world)
    services.rollback(**world.by(), reason="rude")
    with pytest.raises(starting.VersionRejected, match="tiny/2 was taken back"):
        world.start()
    with pytest.raises(starting.VersionRejected):
        world.start(takes_rejected=True)
    assert world.start(takes_rejected=True, reason="prompt was mended").state == "preparing"


def test_an_unknown_policy_is_told_and_a_preset_is_saved_when_first_used(world: World) -> None:
    with pytest.raises(
        UnknownPolicy, match="no policy 'brave'; save one, or use one of careful, quick"
    ):
        world.start(policy="brave")
    assert str(world.start(policy="quick").policy) == "quick/1"


def test_a_candidate_set_by_hand_is_not_taken_over(world: World) -> None:
    make_version()
    endpoints.set_candidate(
        name="chat", version="tiny/3", actor="eve", now=world.now, queue=world.queue
    )
    with pytest.raises(HeldByRollout, match="tiny/3 is the candidate of endpoint 'chat' by hand"):
        world.start()


def test_while_a_rollout_runs_nobody_moves_its_candidate_by_hand(world: World) -> None:
    rollout = begin(world)
    for change in ({"canary_bp": 5000}, {"candidate": ""}):
        with pytest.raises(HeldByRollout, match=f"Rollout {rollout.key} decides"):
            endpoints.configure(
                name="chat", actor="eve", now=world.now, queue=world.queue, **change
            )
    settings = Settings(queue_cap=9)
    endpoints.configure(
        name="chat", actor="eve", now=world.now, queue=world.queue, settings=settings
    )
    assert world.tick().state == "progressing"


# ----------------------------------------------------------------------------------------------- pause and approval


def test_a_pause_keeps_the_traffic_and_the_gates_go_on(world: World) -> None:
    begin(world)
    services.pause(**world.by(), reason="lunch")
    assert world.endpoint.shadow_bp == 5000
    world.pairs(60)
    world.settle()
    paused = world.tick()
    assert (paused.state, paused.hold, paused.decision) == ("paused", "manual", "promote")
    services.resume(**world.by())
    assert world.tick().step_index == 1


def test_harm_is_found_while_paused(world: World) -> None:
    begin(world)
    services.pause(**world.by())
    world.pairs(120, failing=0.6)
    world.settle()
    assert world.tick().state == "rolled_back"


def test_an_approval_is_for_approvers_other_than_the_author(world: World) -> None:
    begin(world, WITH_APPROVAL)
    with pytest.raises(IllegalTransition, match="is progressing knows no approve"):
        services.approve(**world.by("bob"), role="approver")
    world.pairs(60)
    world.settle()
    assert world.tick().state == "awaiting_approval"
    with pytest.raises(services.NotAllowed, match="Only the role approver"):
        services.approve(**world.by("bob"), role="engineer")
    with pytest.raises(services.NotAllowed, match="ada started"):
        services.approve(**world.by("ada"), role="approver")
    approved = services.approve(**world.by("bob"), role="approver", reason="looks fine")
    assert (approved.state, approved.approved_by) == ("progressing", "bob")
    assert world.tick().step_index == 2


def test_an_approval_that_does_not_come_ends_with_the_incumbent(world: World) -> None:
    begin(world, WITH_APPROVAL)
    world.pairs(60)
    world.settle()
    world.tick()
    world.wait(7 * 86_400)
    assert (world.tick().state, world.endpoint.candidate) == ("expired", None)


# -------------------------------------------------------------------------------------------------- early promotion


def test_any_engineer_may_promote_what_has_passed_every_gate(world: World) -> None:
    to_canary(world)
    promoted = services.promote(**world.by("ada"), role="engineer", reason="enough seen")
    assert (promoted.state, promoted.is_forced) == ("baking", False)
    assert world.endpoint.live.name == "tiny/2"


def test_what_has_not_passed_is_forced_by_an_approver_with_a_reason_alone(world: World) -> None:
    begin(world)
    with pytest.raises(services.NotAllowed, match="this caller has engineer"):
        services.promote(**world.by(), role="engineer", reason="hurry")
    with pytest.raises(services.NotAllowed, match="ada started"):
        services.promote(**world.by("ada"), role="approver", reason="hurry")
    with pytest.raises(services.ReasonMissing):
        services.promote(**world.by(), role="approver", reason=" ")
    forced = services.promote(**world.by(), role="approver", reason="the old one leaks")
    assert (forced.state, forced.is_forced, forced.decision) == ("baking", True, "inconclusive")
    assert world.endpoint.live.name == "tiny/2"


def test_an_approval_that_is_to_come_is_not_gone_round(world: World) -> None:
    begin(world, WITH_APPROVAL)
    world.pairs(60)
    world.settle()
    assert world.tick().decision == "promote"
    with pytest.raises(services.NotAllowed):
        services.promote(**world.by(), role="engineer", reason="it passed")


def test_a_candidate_that_no_slot_holds_is_not_promoted_even_by_force(world: World) -> None:
    begin(world)
    world.lose("tiny/2")
    with pytest.raises(VersionNotResident):
        services.promote(**world.by(), role="approver", reason="hurry")
    assert (world.endpoint.live.name, world.rollout.state) == ("tiny/1", "progressing")


# ------------------------------------------------------------------------------------------------------ weight, exits


def test_a_share_is_never_above_what_the_steps_have_decided(world: World) -> None:
    begin(world)
    with pytest.raises(services.WeightRefused, match="allow 0 to 0"):
        services.set_weight(**world.by(), canary_bp=1)
    world.pairs(60)
    world.settle()
    world.tick()
    with pytest.raises(services.WeightRefused, match="canary_bp=1001 is refused"):
        services.set_weight(**world.by(), canary_bp=1001)
    lowered = services.set_weight(**world.by(), canary_bp=50, reason="it is Friday")
    assert (lowered.canary_bp, world.endpoint.canary_bp) == (50, 50)
    assert [share for _, share in lowered.weights] == [1000, 50]
    assert world.tick().canary_bp == 50
