"""What stands in Redis, as values: a version's lane of keys, a placement, a delivery, a lease, a log line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from inference.protocol import FeedbackRecord, QueueEntry, RequestRecord, Resident
from inference.protocol.text import known_fields

GROUP = "slots"  # the consumer group of every queue
ASIDE = "aside"  # holds suspects until a slot claims them; it never has a lease


@dataclass(frozen=True, slots=True)
class Lane:
    """One version of one endpoint, and the names of its keys."""

    endpoint: str
    version: str

    def key(self, kind: str) -> str:
        """``q`` its entries, ``ctl`` notices, ``ready`` slots until when, ``ended`` the recent pace."""
        return f"{kind}:{self.endpoint}:{self.version}"


@dataclass(frozen=True, slots=True)
class LaneCount:
    """How many requests of a version wait, and how many slots have in their hands."""

    version: str
    num_queued: int
    num_in_flight: int


@dataclass(frozen=True, slots=True)
class Applied:
    """What applying a route did. ``is_current`` False: a later route stood there, and nothing changed.

    ``num_requeued`` waiting requests were moved to the live version; ``num_in_flight`` are in the hands of slots whose
    version has no route any more.
    """

    is_current: bool
    num_requeued: int = 0
    num_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """What slots of a lane are told: a request that nobody waits for, or that their version lost its route.

    ``at_ms`` is on the server's clock, as the ids of entries are. ``in_flight`` says how requests end that were given to
    the lane until then; ``generation`` is the route's.
    """

    at_ms: int
    cancelled: str = ""
    in_flight: str = ""
    generation: int = 0

    @classmethod
    def from_entry(cls, entry_id: str, fields: Mapping[str, str]) -> Self:
        """Rebuild from an entry of the lane's ``ctl`` stream."""
        return cls(
            entry_ms(entry_id),
            fields.get("id", ""),
            fields.get("in_flight", ""),
            int(fields.get("generation", 0)),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request was queued. ``deadline_s`` is what the route allows of what was asked.

    ``store_texts`` is the route's: whether prompt and answer may go into the request log. The answer is kept for a while
    where ``kept_for`` names arms that another answer to the request comes from, for the sake of ``rollout``.
    """

    version: str
    generation: int
    arm: str
    entry_id: str
    deadline_s: float
    store_texts: bool = False
    rollout: str = ""
    kept_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A queue entry in a slot's hands, for the ``attempt``-th time in whatever lane."""

    entry_id: str
    attempt: int
    entry: QueueEntry

    @property
    def deliveries(self) -> int:
        """How often it was delivered in its lane; of a suspect from another lane the first time did not count."""
        carried = self.entry.attempt
        return self.attempt - carried + 1 if carried else self.attempt

    @property
    def is_suspect_to_set_aside(self) -> bool:
        """Whether this is the delivery that does not count, after which a suspect is claimed and not run."""
        return self.entry.attempt > 0 and self.deliveries == 1

    @property
    def placed_ms(self) -> int:
        """When the entry came to its lane, on the server's clock."""
        return entry_ms(self.entry_id)


@dataclass(frozen=True, slots=True)
class Lease:
    """Under which name a slot consumes, and for how long it may be silent. ``consumer`` is never used twice."""

    slot: str
    consumer: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease stands again. Where it ``stood`` not until now, it is new, ran out, or Redis lost its memory."""

    server_s: float
    stood: bool


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a slot holds by the desired state; no ``resident``: nothing, or not any more.

    ``has_alternative``: something else is free, should this one not load. ``is_needed_elsewhere``: a live or previous
    version has no slot at all, and of all slots this one is missed least. Not ``is_published``: nobody knows.
    """

    resident: Resident | None = None
    has_alternative: bool = False
    is_needed_elsewhere: bool = False
    is_published: bool = True


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up: its slot died under it ``attempt`` times."""

    letter_id: str
    endpoint: str
    version: str
    request_id: str
    attempt: int
    arm: str = ""

    @property
    def at_ms(self) -> int:
        """When it was given up, on the server's clock."""
        return entry_ms(self.letter_id)

    @classmethod
    def from_entry(cls, entry_id: str, fields: Mapping[str, str]) -> Self:
        """Rebuild from an entry of the stream ``dead``; what an older release did not write is empty."""
        attempt = fields.get("attempt", "")
        return cls(
            letter_id=entry_id,
            endpoint=fields.get("endpoint", ""),
            version=fields.get("version", ""),
            request_id=fields.get("id", ""),
            attempt=int(attempt) if attempt.isdecimal() else 0,
            arm=fields.get("arm", ""),
        )


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the request log with the id to acknowledge it by."""

    entry_id: str
    record: RequestRecord | FeedbackRecord


def entry_ms(entry_id: str) -> int:
    """The server's time in the id of a stream's entry."""
    return int(entry_id.partition("-")[0])


def read_residents(text: str) -> list[Resident]:
    """The residents of what ``desired`` holds."""
    return [Resident(**known_fields(Resident, each)) for each in json.loads(text)]
