"""Rollouts under any order of what people, time, slots, traffic and crashes do, against what must always be true."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from controlplane.endpoints import publication
from controlplane.endpoints import services as endpoints
from controlplane.errors import DomainError
from controlplane.events.models import Event
from controlplane.rollouts import loop, services
from controlplane.rollouts.machine import FINAL, INCUMBENT_SIDE
from controlplane.rollouts.models import Look, Rollout
from controlplane.rollouts.steps import largest_bp, parse_steps
from inference.queue import Queue
from tests.controlplane.rollouts.crashes import Fuse, Killed, fused
from tests.controlplane.rollouts.world import DOCUMENT, World

DAY_S = 86_400
DOCUMENTS = (
    DOCUMENT,
    {
        **DOCUMENT,
        "steps": [
            {"type": "canary", "bp": 500, "floor": 5, "for_s": 0, "until": "floor"},
            {"type": "pause", "for_s": 600},
            {"type": "approval", "deadline_s": DAY_S},
            {"type": "canary", "bp": 3000, "floor": 5, "for_s": 0},
        ],
        "deadline_s": 3 * DAY_S,
    },
)


class Journey:
    """One random walk over ``OPERATIONS``."""

    def __init__(self, queue: Queue, seed: int) -> None:
        self.world = World(queue)
        self.random = random.Random(seed)  # noqa: S311
        self.quality = self.random.choice([0.0, 0.0, 0.5])
        self.ends: dict[str, str] = {}

    def walk(self, num_operations: int) -> None:
        self.start()
        for _ in range(num_operations):
            (operation,) = self.random.choices(list(OPERATIONS), list(OPERATIONS.values()))
            with suppress(DomainError):  # what is refused must leave everything as it was
                operation(self)
            self.check(operation.__name__)
        self.end()

    def end(self) -> None:
        """Nobody does anything any more: time alone brings every rollout to its end."""
        for _ in range(6):
            self.tick()
            self.world.wait(4 * DAY_S)
        self.check("the end")
        assert not Rollout.objects.active().exists()

    def check(self, after: str) -> None:
        endpoint = self.world.endpoint
        assert Rollout.objects.active().count() <= 1, after
        for rollout in Rollout.objects.with_names():
            allowed = largest_bp(parse_steps(rollout.document["steps"]), rollout.step_index)
            assert rollout.canary_bp <= allowed, after
            events = Event.objects.about(rollout.subject).in_order()
            versions = [event.data["version"] for event in events if "version" in event.data]
            assert versions == list(range(1, rollout.version + 1)), after
            if endpoint.rollout == rollout.key:
                assert endpoint.canary_bp == rollout.canary_bp, after
            if rollout.promoted_at and not rollout.is_forced:
                assert Look.objects.filter(rollout=rollout, decision="promote").exists(), after
            if rollout.state in INCUMBENT_SIDE:
                assert endpoint.rollout != rollout.key, after
            self._check_end(rollout, after)
        if not endpoint.rollout:
            assert (endpoint.canary_bp, endpoint.shadow_bp) == (0, 0), after

    def _check_end(self, rollout: Rollout, after: str) -> None:
        """An end stays one; a promotion alone may be taken back."""
        before = self.ends.get(rollout.key)
        if before is not None:
            assert rollout.state in {before, "rolled_back" if before == "promoted" else before}
        if rollout.state in FINAL:
            self.ends[rollout.key] = rollout.state
        assert (rollout.ended_at is not None) == (rollout.state in FINAL), after

    # ------------------------------------------------------------------------------------------------ operations

    def tick(self) -> None:
        self.world.report()
        loop.tick(queue=self.world.queue, now=self.world.now)

    def judged_traffic(self) -> None:
        self.traffic()
        self.world.settle()
        self.tick()

    def crash(self) -> None:
        """A tick that dies somewhere; then what runs all the time."""
        self.world.report()
        fuse = Fuse(kill_at=self.random.randint(1, 60))
        with suppress(Killed), fused(self.world.queue, fuse):
            loop.tick(queue=self.world.queue, now=self.world.now)
        publication.relay(queue=self.world.queue, now=self.world.now)

    def start(self) -> None:
        document = self.random.choice(DOCUMENTS)
        self.world.start(document, takes_rejected=True, reason="once more")
        self.world.hold("tiny/2")

    def traffic(self) -> None:
        rollout = Rollout.objects.active().first()
        if rollout is not None and rollout.shadow_bp:
            self.world.pairs(40, failing=self.quality)
        if rollout is not None and rollout.canary_bp and self.world.endpoint.candidate:
            self.world.requests(60)
            self.world.requests(15, arm="candidate", failing=self.quality)

    def wait(self) -> None:
        self.world.wait(self.random.choice([1, 60, 200, 700, 3600, DAY_S]))

    def hold(self) -> None:
        name = self.random.choice(["pause", "resume", "resume"])
        getattr(services, name)(**self.world.by(), reason="so")

    def end_it(self) -> None:
        name = self.random.choice(["abort", "rollback", "retry"])
        getattr(services, name)(**self.world.by(), reason="so")

    def approve(self) -> None:
        act = self.random.choice([services.approve, services.promote])
        role = self.random.choice(["engineer", "approver"])
        act(**self.world.by(self.random.choice(["ada", "bob"])), role=role, reason="so")

    def weigh(self) -> None:
        canary_bp = self.random.choice([0, 100, 500, 1000, 3000])
        services.set_weight(**self.world.by(), canary_bp=canary_bp)

    def by_hand(self) -> None:
        version = self.random.choice(["tiny/1", "tiny/2"])
        self.world.report()
        endpoints.promote(
            name="chat", version=version, actor="eve", reason="", now=self.world.now,
            queue=self.world.queue,
        )  # fmt: skip

    def back_by_hand(self) -> None:
        self.world.report()
        endpoints.rollback(
            name="chat", actor="eve", now=self.world.now, queue=self.world.queue, force=True
        )


# What can happen, and how often: what ends a rollout is rare, or none would come far.
OPERATIONS: dict[Callable[[Journey], None], int] = {
    Journey.tick: 4,
    Journey.judged_traffic: 8,
    Journey.crash: 4,
    Journey.start: 2,
    Journey.traffic: 2,
    Journey.wait: 2,
    Journey.hold: 2,
    Journey.end_it: 1,
    Journey.approve: 3,
    Journey.weigh: 1,
    Journey.by_hand: 1,
    Journey.back_by_hand: 1,
}


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_in_whatever_order_the_promises_hold(queue: Queue, seed: int) -> None:
    Journey(queue, seed).walk(60)
