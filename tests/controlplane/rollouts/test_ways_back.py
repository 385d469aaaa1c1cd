"""The ways back from every state of a rollout, and two who move one at once."""

from __future__ import annotations

import pytest

from controlplane.endpoints.moves import (
    NothingToRollBackTo,
    PreviousNotReady,
)
from controlplane.events.models import Event
from controlplane.rollouts import services
from controlplane.rollouts.decisions import Move
from controlplane.rollouts.machine import IllegalTransition, Trigger
from controlplane.rollouts.models import PolicyImmutable, Rollout
from controlplane.rollouts.transitions import By, RolloutChanged, carry_out
from inference.queue import Queue
from tests.controlplane.rollouts.world import (
    DOCUMENT,
    World,
    begin,
    events_of,
    to_baking,
    to_canary,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(queue: Queue) -> World:
    return World(queue)


STATES = {
    "preparing": lambda world: world.start(),
    "progressing": begin,
    "paused": lambda world: (begin(world), services.pause(**world.by())),
    "canary": to_canary,
    "baking": to_baking,
}


@pytest.mark.parametrize("action", ["abort", "rollback"])
@pytest.mark.parametrize("state", STATES)
def test_from_every_state_there_is_a_way_back_and_it_may_be_taken_twice(
    world: World, state: str, action: str
) -> None:
    STATES[state](world)
    first = getattr(services, action)(**world.by(), reason="enough")
    assert first.state == {"abort": "aborted", "rollback": "rolled_back"}[action]
    endpoint = world.endpoint
    assert (endpoint.live.name, endpoint.candidate, endpoint.canary_bp, endpoint.rollout) == (
        "tiny/1", None, 0, "",
    )  # fmt: skip
    rejected = {rejection.version.name for rejection in endpoint.rejections.all()}
    assert rejected == ({"tiny/2"} if action == "rollback" else set())
    again = getattr(services, action)(**world.by(), reason="enough")
    assert (again.version, world.endpoint.generation) == (first.version, endpoint.generation)


def test_a_promotion_is_taken_back_while_the_incumbent_is_warm(world: World) -> None:
    to_baking(world)
    world.wait(60)
    assert world.tick().state == "promoted"
    back = services.rollback(**world.by("eve"), reason="rude to somebody")
    assert (back.state, world.endpoint.live.name) == ("rolled_back", "tiny/1")
    assert events_of(back)[-1] == "rolled_back"
    again = services.rollback(**world.by("bob"))
    assert again.version == back.version


def test_a_rollback_of_what_is_live_asks_whether_anybody_could_answer(world: World) -> None:
    to_baking(world)
    world.lose("tiny/1")
    with pytest.raises(PreviousNotReady):
        services.rollback(**world.by())
    assert world.rollout.state == "baking"
    assert services.rollback(**world.by(), force=True).state == "rolled_back"


def test_a_rollback_with_redis_away_is_committed_all_the_same(
    world: World, absent_queue: Queue
) -> None:
    to_baking(world)
    back = services.rollback(key=world.key, actor="eve", now=world.now, queue=absent_queue)
    assert (back.state, world.endpoint.live.name) == ("rolled_back", "tiny/1")


def test_of_a_promotion_without_an_incumbent_left_the_rollback_says_so(world: World) -> None:
    to_baking(world)
    world.wait(60)
    world.tick()
    endpoint = world.endpoint
    endpoint.previous = None
    endpoint.save()
    with pytest.raises(NothingToRollBackTo):
        services.rollback(**world.by())


def test_requests_in_flight_end_as_the_policy_says_only_when_harm_is_told(world: World) -> None:
    begin(world, {**DOCUMENT, "in_flight": "cut"})
    services.abort(**world.by())
    assert world.endpoint.ending == "finish"
    world.start({**DOCUMENT, "in_flight": "cut"})
    world.tick()
    services.rollback(**world.by())
    assert (world.endpoint.ending, world.endpoint.in_flight) == ("cut", "finish")


def test_a_rollout_is_tried_again_as_a_new_one_that_has_counted_nothing(world: World) -> None:
    first = begin(world)
    with pytest.raises(IllegalTransition, match="nothing to try again"):
        services.retry(**world.by())
    services.abort(**world.by())
    second = services.retry(**world.by(), reason="slots are back")
    assert (second.attempt, second.state, second.sealed_block > 0) == (2, "preparing", True)
    assert second.key != first.key


def test_the_second_of_two_who_move_a_rollout_is_told(world: World) -> None:
    begin(world)
    stale = world.rollout
    services.pause(**world.by())
    version = world.rollout.version
    with pytest.raises(RolloutChanged, match="no longer progressing"):
        carry_out(
            rollout=stale,
            move=Move(Trigger.PAUSE, "late"),
            by=By("eve", world.now),
            queue=world.queue,
        )
    assert world.rollout.version == version


@pytest.mark.parametrize("action", ["abort", "rollback"])
def test_who_takes_a_rollout_back_while_somebody_moves_it_is_not_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    begin(world)
    read_before = [world.rollout]
    services.pause(**world.by(), reason="somebody was faster")
    find = services.find

    def find_late(key: str) -> Rollout:
        return read_before.pop() if read_before else find(key)

    monkeypatch.setattr(services, "find", find_late)
    first = getattr(services, action)(**world.by())
    assert first.state in {"aborted", "rolled_back"}
    read_before.append(first)
    first.state = "paused"  # as the second of two at once has read it
    again = getattr(services, action)(**world.by())
    assert (again.version, again.state) == (first.version, world.rollout.state)


def test_every_move_leaves_one_event_with_its_number(world: World) -> None:
    to_baking(world)
    services.rollback(**world.by())
    events = Event.objects.about(world.rollout.subject).in_order()
    assert [event.data["version"] for event in events] == list(range(1, world.rollout.version + 1))
    assert [event.data["state"] for event in events][-1] == "rolled_back"


def test_a_policy_that_stands_is_neither_changed_nor_deleted(world: World) -> None:
    policy = world.start().policy
    policy.document = {}
    with pytest.raises(PolicyImmutable, match="test/1 stands"):
        policy.save()
    with pytest.raises(PolicyImmutable):
        policy.delete()


def test_a_rollout_that_is_not_there_is_told(world: World) -> None:
    with pytest.raises(services.UnknownRollout, match="no rollout 'x'"):
        services.abort(key="x", actor="bob", now=world.now, queue=world.queue)
