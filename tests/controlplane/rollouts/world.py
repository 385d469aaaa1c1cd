"""A small world for rollouts: an endpoint with slots, a clock, traffic that was stored, and ticks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from controlplane.endpoints import publication
from controlplane.endpoints.models import Endpoint
from controlplane.events.models import Event
from controlplane.monitoring.models import RequestLog
from controlplane.rollouts import loop, services
from controlplane.rollouts.models import Rollout
from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.policies import save_policy
from inference.queue import Queue
from inference.replicas import Member
from tests.factories import NOW, hold_ready, make_endpoint, make_version

DEADLINE_S = 10.0
_ids = count(1)

# Small, and quick to decide: one gate on failures, whose margin a hundred pairs can show.
DOCUMENT: dict[str, Any] = {
    "block_s": 10,
    "metrics": {
        "failure_rate": {
            "kind": "flags", "flags": [], "tolerance": 0.05, "margin": 0.2, "overall_margin": 0.2,
            "minimum": 20,
        }
    },
    "segments": {"keys": ["lang"], "minimum": 20},
    "steps": [
        {"type": "shadow", "share": 0.5, "floor": 20},
        {"type": "canary", "bp": 1000, "floor": 10, "for_s": 0, "until": "floor"},
        {"type": "bake", "for_s": 60},
    ],
}  # fmt: skip


@dataclass
class World:
    """``chat`` with tiny/1 live and tiny/2 to be rolled out; ``now`` moves by ``wait``."""

    queue: Queue
    now: datetime = NOW
    members: dict[str, Member] = field(default_factory=dict)
    spare: list[Member] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(7))  # noqa: S311

    def __post_init__(self) -> None:
        """Two versions, an endpoint, and a slot that holds the live one."""
        make_endpoint("chat", live=make_version(), deadline_s=DEADLINE_S)
        make_version()
        publication.publish(name="chat", queue=self.queue, now=self.now)
        self.hold("tiny/1")
        # Two more slots, which could take a candidate; they are free as far as this endpoint goes.
        self.spare = hold_ready(self.queue, "spare", "tiny/8", "tiny/9")

    def hold(self, version: str) -> None:
        """A slot that says it is ready with ``version``."""
        self.members[version] = hold_ready(self.queue, "chat", version)[0]

    def lose(self, version: str) -> None:
        """The slot of ``version`` is gone."""
        self.members.pop(version).leave()

    def report(self) -> None:
        """Every slot says once more that it is ready, because a silent one counts as gone."""
        for member in (*self.spare, *self.members.values()):
            member.renew()

    def start(self, document: dict[str, Any] | None = None, **fields: Any) -> Rollout:
        """A rollout of tiny/2 by ada."""
        save_policy(name="test", document=document or DOCUMENT, actor="ada", now=self.now)
        values: dict[str, Any] = {
            "endpoint": "chat", "candidate": "tiny/2", "policy": "test", "actor": "ada",
            "now": self.now, "queue": self.queue,
        }  # fmt: skip
        return services.start(**values | fields)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    def settle(self) -> None:
        """Let time pass until everything that has come may be counted."""
        self.wait(DEADLINE_S + 100)

    def tick(self) -> Rollout:
        """One tick; the newest rollout afterwards."""
        self.report()
        loop.tick(queue=self.queue, now=self.now)
        return self.rollout

    @property
    def rollout(self) -> Rollout:
        """The newest rollout."""
        return Rollout.objects.with_names().newest_first()[0]

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint as it is."""
        return Endpoint.objects.with_versions().get(name="chat")

    @property
    def key(self) -> str:
        """The newest rollout's key."""
        return self.rollout.key

    def by(self, actor: str = "bob") -> dict[str, Any]:
        """What every action takes."""
        self.report()
        return {"key": self.key, "actor": actor, "now": self.now, "queue": self.queue}

    def pairs(self, n: int, *, arm: str = "shadow", failing: float = 0.0, **fields: Any) -> None:
        """``n`` pairs that came this moment; the candidate fails in a share of them."""
        Pair.objects.bulk_create(
            make_pair(self.key, arm, self.now, has_failed=self.random.random() < failing, **fields)
            for _ in range(n)
        )

    def requests(self, n: int, *, arm: str = "live", failing: float = 0.0, **fields: Any) -> None:
        """``n`` requests that came this moment and took a tenth of a second, or as long as ``total_s``."""
        endpoint = self.endpoint
        version = endpoint.candidate if arm == "candidate" else endpoint.live
        assert version is not None
        rows = []
        for _ in range(n):
            has_failed = self.random.random() < failing
            values: dict[str, Any] = {
                "request_id": f"r{next(_ids)}", "endpoint": "chat", "version": version.name,
                "generation": endpoint.generation, "arm": arm,
                "outcome": "engine_failed" if has_failed else "ok", "status": 500 if has_failed else 200,
                "streamed": False, "prompt_tokens": 10, "completion_tokens": 10, "total_s": 0.1,
                "finished_at": self.now + timedelta(seconds=fields.get("total_s", 0.1)),
            }  # fmt: skip
            rows.append(RequestLog(**values | fields))
        RequestLog.objects.bulk_create(rows)


def make_pair(
    rollout: str, arm: str, at: datetime, *, has_failed: bool = False, **fields: Any
) -> Pair:
    """A pair that was not stored yet."""
    number = next(_ids)
    values: dict[str, Any] = {
        "rollout": rollout, "request_id": f"p{number}", "arm": arm, "endpoint": "chat", "at": at,
        "state": "failed" if has_failed else "compared", "prompt_digest": f"d{number}",
        "incumbent": "tiny/1", "incumbent_outcome": "ok", "candidate": "tiny/2",
        "candidate_outcome": "engine_failed" if has_failed else "ok", "classifier": "rules-v1",
    }  # fmt: skip
    return Pair(**values | fields)


def events_of(rollout: Rollout) -> list[str]:
    """What happened to a rollout, in order."""
    events = Event.objects.about(rollout.subject).in_order()
    return [event.type.removeprefix("rollout.") for event in events]


WITH_APPROVAL = {
    **DOCUMENT,
    "steps": [
        {"type": "shadow", "share": 0.5, "floor": 20},
        {"type": "approval"},
        {"type": "canary", "bp": 1000, "floor": 10, "for_s": 0, "until": "floor"},
        {"type": "bake", "for_s": 60},
    ],
}


def begin(world: World, document: dict[str, Any] | None = None) -> Rollout:
    """A rollout at its first step."""
    world.start(document)
    world.hold("tiny/2")
    return world.tick()


def to_canary(world: World) -> Rollout:
    """A rollout whose candidate has a tenth of the traffic, and has passed its gates."""
    begin(world)
    world.pairs(60)
    world.settle()
    return world.tick()


def to_baking(world: World) -> Rollout:
    """A rollout whose candidate is live."""
    to_canary(world)
    world.requests(60)
    world.requests(12, arm="candidate")
    world.settle()
    return world.tick()
