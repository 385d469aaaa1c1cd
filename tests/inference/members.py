"""Members of a fleet of slots for tests, without their processes."""

from __future__ import annotations

import redis

from inference.protocol import Resident
from inference.queue import Queue
from inference.replicas import Member

RESIDENT = Resident("chat", "small/1", "/artifacts/1", {"max_num_seqs": 4})
OTHER = Resident("chat", "small/2", "/artifacts/2")


def join(queue: Queue, slot: str) -> Member:
    """A slot that has a lease."""
    member = Member(queue, slot, lease_ms=60_000)
    assert member.renew()
    return member


def crash(redis_url: str, member: Member) -> None:
    """End its lease, as when its process has died."""
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"slot:{member.consumer}")
