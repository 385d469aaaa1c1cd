"""What stands in Redis, as values: a version's lane of keys, a placement, a delivery, a lease, a log line."""

from __future__ import annotations

from dataclasses import dataclass

from inference.protocol import QueueEntry, RequestRecord


@dataclass(frozen=True, slots=True)
class Lane:
    """One version of one endpoint, and the names of its keys."""

    endpoint: str
    version: str

    def key(self, kind: str) -> str:
        """``q`` its entries, ``ctl`` cancels, ``ready`` slots until when, ``ended`` the recent pace."""
        return f"{kind}:{self.endpoint}:{self.version}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request was queued. ``deadline_s`` is what the route allows of what was asked.

    ``store_texts`` is the route's: whether prompt and answer may go into the request log.
    """

    version: str
    generation: int
    arm: str
    entry_id: str
    deadline_s: float
    store_texts: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """A queue entry in a slot's hands, for the ``attempt``-th time."""

    entry_id: str
    attempt: int
    entry: QueueEntry


@dataclass(frozen=True, slots=True)
class Lease:
    """Under which name a slot consumes, and for how long it may be silent. ``consumer`` is never used twice."""

    slot: str
    consumer: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the request log with the id to acknowledge it by."""

    entry_id: str
    record: RequestRecord
