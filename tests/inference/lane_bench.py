"""Lanes of a real server in the hands of a test: routes, requests, slots that come and go, and what stands where."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import redis

from inference.protocol import GenerateRequest, QueueEntry, Route, SamplingParams
from inference.queue import AsyncQueue, Delivery, Lane, Lease, Placement, Queue

LAST_ATTEMPT = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """One entry of a lane; ``consumer`` is empty while no slot has it."""

    lane: Lane
    entry_id: str
    entry: QueueEntry
    consumer: str = ""
    deliveries: int = 0


def route(live: str = "small/1", generation: int = 1, **fields: Any) -> Route:
    """A route of the endpoint ``chat`` with a roomy queue, unless ``fields`` say otherwise."""
    usual: dict[str, Any] = {"endpoint": "chat", "incarnation": "a", "queue_cap": 10_000}
    return Route(**usual | fields, live=live, generation=generation)


class LaneBench:
    """A gateway's and any number of slots' calls, one after the other."""

    def __init__(self, url: str) -> None:
        self.queue = Queue(url)
        self.redis: Any = redis.Redis.from_url(url, decode_responses=True, protocol=2)
        self._runner = asyncio.Runner()
        self._gateway = AsyncQueue(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._gateway.close())
        self._runner.close()
        self.redis.close()
        self.queue.close()

    def join(self, lane: Lane, consumer: str) -> str:
        """A ready slot."""
        lease = Lease(consumer.partition(".")[0], consumer, 600_000)
        assert self.queue.renew(lease, "{}", lane, is_ready=True)
        return consumer

    def crash(self, consumer: str) -> None:
        """As when its lease has run out."""
        self.redis.delete(f"slot:{consumer}")

    def enqueue(
        self, request_id: str, *, endpoint: str = "chat", user: str = "user", gateway: str = "gw"
    ) -> Placement:
        """What a gateway does with a request."""
        request = GenerateRequest(request_id, endpoint, SamplingParams(), 60.0, prompt="Hello")
        return self._runner.run(self._gateway.enqueue(request, gateway, user))

    def cancel(self, request_id: str) -> bool:
        """What a gateway does when its caller leaves."""
        return self._runner.run(self._gateway.cancel(request_id))

    def pull(self, lane: Lane, consumer: str, count: int = 100) -> list[Delivery]:
        """What a slot runs of what it is given: suspects from other lanes are set aside."""
        given = self.queue.pull(lane, consumer, count, 1)
        suspects = [each for each in given if each.is_suspect_to_set_aside]
        if suspects:
            self.queue.set_aside(lane, consumer, suspects)
        return [each for each in given if not each.is_suspect_to_set_aside]

    def claim(self, lane: Lane, consumer: str, count: int = 8) -> list[Delivery]:
        """What a slot takes over."""
        return self.queue.claim(lane, consumer, count, LAST_ATTEMPT)

    def standing(self) -> list[Standing]:
        """Every entry of every lane."""
        keys = sorted(self.redis.scan_iter("q:*", count=10_000))
        pipe = self.redis.pipeline()
        for key in keys:
            pipe.xrange(key).xpending_range(key, "slots", "-", "+", 10_000)
        replies = pipe.execute(raise_on_error=False)
        return [
            standing
            for key, entries, pending in zip(keys, replies[::2], replies[1::2], strict=True)
            for standing in _stand(key, entries, pending)
        ]

    def ids(self, lane: Lane) -> list[str]:
        """The requests of a lane in order."""
        return [each.entry.id for each in self.standing() if each.lane == lane]

    def where(self, *request_ids: str) -> list[tuple[str, str]]:
        """Where each request says it stands."""
        pipe = self.redis.pipeline()
        for request_id in request_ids:
            pipe.hmget(f"req:{request_id}", "lane", "entry_id")
        return [(lane, entry_id) for lane, entry_id in pipe.execute()]


def _stand(key: str, entries: Any, pending: Any) -> list[Standing]:
    _, endpoint, version = key.split(":")
    # Where no slot ever asked for any, nothing is pending.
    rows = [] if isinstance(pending, redis.ResponseError) else pending
    held = {row["message_id"]: (row["consumer"], row["times_delivered"]) for row in rows}
    found = [
        Standing(
            Lane(endpoint, version),
            entry_id,
            QueueEntry.from_fields(fields),
            *held.pop(entry_id, ("", 0)),
        )
        for entry_id, fields in entries
    ]
    assert not held, "an entry was deleted and not acknowledged"
    return found
