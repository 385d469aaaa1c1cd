"""A rollout whose process dies between any two steps: it goes on where it stood, and nothing is done twice.

Each operation is killed at every boundary there is: before each statement to the database, commits of transactions
among them, and before and after each call to Redis. Afterwards the relay, the reconciler and ticks run as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import transaction

from controlplane.endpoints import publication
from controlplane.endpoints.routing import route_of
from controlplane.events.models import Event
from controlplane.events.services import verify
from controlplane.rollouts import loop, services
from controlplane.rollouts.models import Rollout, SegmentCount
from inference.queue import Queue
from tests.controlplane.rollouts.crashes import Fuse, Killed, fused
from tests.controlplane.rollouts.world import World

Action = Callable[[World], object]


def nothing(world: World) -> None:
    del world


def first_step(world: World) -> None:
    world.start(reason="try")
    world.hold("tiny/2")
    world.tick()


def before_canary(world: World) -> None:
    first_step(world)
    world.pairs(60)
    world.settle()


def before_promotion(world: World) -> None:
    before_canary(world)
    world.tick()
    world.requests(60)
    world.requests(12, arm="candidate")
    world.settle()


def live(world: World) -> None:
    before_promotion(world)
    world.tick()


def bad(world: World) -> None:
    first_step(world)
    world.pairs(150, failing=0.6)
    world.settle()


def tick(world: World) -> object:
    return loop.tick(queue=world.queue, now=world.now)


def start(world: World) -> object:
    return world.start(reason="try")


def rollback(world: World) -> object:
    return services.rollback(**world.by(), reason="enough")


# What stands before, what is killed, and where it all must end; without the kill, and with it at any boundary.
CASES: dict[str, tuple[Action, Action, tuple[str, str, int]]] = {
    "start": (nothing, start, ("preparing", "tiny/1", 0)),
    "step": (before_canary, tick, ("progressing", "tiny/1", 1000)),
    "promote": (before_promotion, tick, ("baking", "tiny/2", 0)),
    "roll back by verdict": (bad, tick, ("rolled_back", "tiny/1", 0)),
    "roll back by hand": (before_canary, rollback, ("rolled_back", "tiny/1", 0)),
    "roll back what is live": (live, rollback, ("rolled_back", "tiny/1", 0)),
}


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.parametrize("case", CASES)
def test_an_operation_that_dies_anywhere_is_done_once_in_the_end(queue: Queue, case: str) -> None:
    before, act, end = CASES[case]
    world = World(queue)
    before(world)
    base, counts = generation_of(world), counted()
    uncut = Fuse()
    with at_savepoint(), fused(queue, uncut):
        act(world)
    assert len(uncut.boundaries) > 15
    reached: set[bool] = set()
    for number in uncut.boundaries:
        with at_savepoint():
            restore(world)
            world.report()
            with pytest.raises(Killed), fused(queue, Fuse(kill_at=number)):
                act(world)
            is_done = has_moved(world, base)
            reached.add(is_done)
            check_weight(world)
            again(world, act, is_done=is_done)
            check_end(world, end)
            assert counted() == counts or act is tick
    assert reached == {False, True}  # some boundaries come before the commit, and some after it


def again(world: World, act: Action, *, is_done: bool) -> None:
    """What happens after a crash: the relay, the reconciler and a tick; and whoever was not answered asks again."""
    publication.relay(queue=world.queue, now=world.now)
    publication.reconcile(queue=world.queue, now=world.now)
    if act is not tick and not is_done:
        act(world)
    world.report()
    for _ in range(2):
        tick(world)


def check_end(world: World, end: tuple[str, str, int]) -> None:
    """The rollout, its endpoint and Redis agree, and each move left one event."""
    rollout, endpoint = world.rollout, world.endpoint
    assert (rollout.state, endpoint.live.name, endpoint.canary_bp) == end
    assert Rollout.objects.count() == 1
    events = list(Event.objects.about(rollout.subject).in_order())
    assert [event.data["version"] for event in events] == list(range(1, rollout.version + 1))
    assert verify().problem == ""
    assert world.queue.read_route("chat") == route_of(endpoint.to_state())
    check_weight(world)


def check_weight(world: World) -> None:
    """Neither the endpoint nor Redis gives the candidate more than was decided."""
    rollout = Rollout.objects.first()
    decided = rollout.canary_bp if rollout else 0
    assert world.endpoint.canary_bp == decided
    largest = max([share for _, share in rollout.weights] if rollout else [0], default=0)
    route = world.queue.read_route("chat")
    assert route is not None
    assert route.canary_bp <= largest


def has_moved(world: World, base: int) -> bool:
    return generation_of(world) != base


def generation_of(world: World) -> int:
    return world.endpoint.generation


def counted() -> list[object]:
    return list(SegmentCount.objects.order_by("pk").values_list("metric", "segment", "counts"))


def restore(world: World) -> None:
    """Redis as the database has it: the kill before left something later there."""
    world.queue.withdraw_route("chat")
    publication.publish(name="chat", queue=world.queue, now=world.now)


@contextmanager
def at_savepoint() -> Iterator[None]:
    """Everything within is undone at the end, as if it had not been."""
    block = transaction.atomic()
    block._from_testcase = True  # type: ignore[attr-defined]  # transactions within may be durable ones
    with block:
        yield
        transaction.set_rollback(True)
