"""What a slot asks of Redis: its membership, its entries, its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import redis

from inference.protocol import QueueEntry, StepFrame
from inference.queue.connection import Connection
from inference.queue.lanes import (
    ASIDE,
    GROUP,
    Adoption,
    Delivery,
    Lane,
    Lease,
    Notice,
    Renewal,
    read_residents,
)
from inference.queue.link import create_group, translated

FENCE_S = 86_400  # longer than any process sleeps and wakes
FRAMES_KEPT = 5_000
FRAMES_TTL_S = 120
DEAD_KEPT = 1_000


class SlotCalls(Connection):
    """The calls of a slot."""

    def renew(
        self, lease: Lease, report: str, lane: Lane | None, *, is_ready: bool
    ) -> Renewal | None:
        """Renew lease, readiness and report at once; None if the lease is lost for good."""
        ready_key = lane.key("ready") if lane else ""
        keys = [f"slot:{lease.consumer}", f"fenced:{lease.consumer}", "slots", ready_key]
        with translated():
            args: list[str | int] = [lease.slot, lease.lease_ms, report, int(is_ready)]
            now_us, stood = self._lua["renew"](keys, args)
        return Renewal(now_us / 1e6, stood=bool(stood)) if now_us else None

    def release(self, lease: Lease, lane: Lane | None) -> None:
        """End a lease early: what the consumer still has is free for others at once."""
        with translated(), self._redis.pipeline(transaction=True) as pipe:
            if lane:
                pipe.zrem(lane.key("ready"), lease.slot)
            pipe.hdel("slots", lease.slot).delete(f"slot:{lease.consumer}").execute()

    def adopt(self, consumer: str, holding: Lane | None) -> Adoption:
        """What ``consumer`` holds now: its own resident, else a free one (only of ``holding``, if given)."""
        wish = _name(holding) if holding else ""
        with translated():
            keys = ["desired", "residents", "failures", "slots"]
            reply = self._lua["adopt"](keys, [consumer, wish])
        if reply is None:
            return Adoption(is_published=False)
        text, index, has_alternative, is_needed = reply
        resident = None if index < 0 else read_residents(text)[index]
        return Adoption(resident, bool(has_alternative), bool(is_needed))

    def read_failures(self) -> dict[str, str]:
        """What was put for desired residents, by ``endpoint:version``."""
        with translated():
            failures: dict[str, str] = self._redis.hgetall("failures")
        return failures

    def put_failure(self, lane: Lane, json_text: str | None) -> None:
        """Remember how the loading of a version failed, or that it did not; ``adopt.lua`` reads two of the fields."""
        with translated():
            if json_text is None:
                self._redis.hdel("failures", _name(lane))
            else:
                self._redis.hset("failures", _name(lane), json_text)

    def read_reports(self) -> tuple[float, dict[str, tuple[float, str]]]:
        """The server's clock, and each slot's last report with its time; all in seconds."""
        with translated(), self._redis.pipeline(transaction=True) as pipe:
            (seconds, micros), reports = pipe.time().hgetall("slots").execute()
        parted = {slot: text.partition(" ") for slot, text in reports.items()}
        return seconds + micros / 1e6, {
            slot: (int(at_ms) / 1000, report) for slot, (at_ms, _, report) in parted.items()
        }

    # --------------------------------------------------------------------------------- slots: entries and rows

    def pull(self, lane: Lane, consumer: str, count: int, block_ms: int) -> list[Delivery]:
        """Take up to ``count`` new entries, waiting up to ``block_ms`` for the first; ``set_aside`` the suspects."""
        rows = self._read_group(GROUP, consumer, lane.key("q"), ">", count, block_ms)
        return [_deliver(entry_id, 1, fields) for entry_id, fields in rows]

    def claim(self, lane: Lane, consumer: str, count: int, last_attempt: int) -> list[Delivery]:
        """Take over up to ``count`` entries of consumers without a lease; one on its last attempt comes alone.

        A lane without a route leaves its entries to slots of the live version, while one of those is ready.
        """
        keys = [lane.key("q"), f"route:{lane.endpoint}"]
        args: list[Any] = [consumer, count, last_attempt, FENCE_S, lane.endpoint, lane.version]
        with translated():
            rows = self._lua["claim"](keys, args)
        return [
            Delivery(entry_id, attempt, QueueEntry.from_fields(_pair_up(flat)))
            for entry_id, attempt, flat in rows
        ]

    def find_unheard(self, lane: Lane, consumer: str, known: set[str]) -> list[Delivery]:
        """Entries that were delivered to ``consumer`` in a reply it never got; ``known`` are those it has."""
        queue = lane.key("q")
        with translated():
            try:
                pending = self._redis.xpending_range(queue, GROUP, "-", "+", 1000, consumer)
            except redis.ResponseError as error:
                create_group(self._redis, queue, GROUP, error)
                return []
            unheard = [row for row in pending if row["message_id"] not in known]
            found = [
                self._redis.xrange(queue, row["message_id"], row["message_id"]) for row in unheard
            ]
        return [
            _deliver(row["message_id"], row["times_delivered"], entry[0][1])
            for row, entry in zip(unheard, found, strict=True)
            if entry
        ]

    def read_bodies(self, request_ids: Sequence[str]) -> list[str | None]:
        """The bodies in order; None where a request was cancelled, ended, or is long past its deadline."""
        with translated(), self._redis.pipeline(transaction=False) as pipe:
            for each in request_ids:
                pipe.hget(f"req:{each}", "body")
            bodies: list[str | None] = pipe.execute()
        return bodies

    def send(
        self,
        lane: Lane,
        consumer: str,
        frames: Mapping[str, StepFrame],
        *,
        ended: Sequence[Delivery] = (),
        dead: Sequence[Delivery] = (),
        returned: Sequence[Delivery] = (),
    ) -> bool:
        """Send one frame per gateway, end entries, and hand ``returned`` ones to the live version, as if never delivered.

        May be repeated: gateways drop repeated rows. False: no frame was sent, because other slots have taken over
        what this consumer had.
        """
        with translated(), self._redis.pipeline(transaction=False) as pipe:
            outs = [f"out:{gateway}" for gateway in frames]
            texts = [frame.to_json() for frame in frames.values()]
            self._pipe(
                pipe, "send", [f"fenced:{consumer}", *outs], FRAMES_KEPT, FRAMES_TTL_S, *texts
            )
            for delivery in dead:
                letter = delivery.entry.to_fields() | asdict(lane) | {"attempt": delivery.attempt}
                pipe.xadd("dead", letter, maxlen=DEAD_KEPT)
            if ended:
                parts = [part for each in ended for part in (each.entry_id, each.entry.id)]
                self._pipe(pipe, "settle", [lane.key("q"), lane.key("ended")], consumer, *parts)
            if returned:
                counts = [part for each in returned for part in (each.entry_id, each.attempt - 1)]
                keys = [lane.key("q"), f"route:{lane.endpoint}"]
                self._pipe(pipe, "requeue", keys, consumer, lane.endpoint, *counts)
            return bool(pipe.execute()[0])

    def give_back(self, lane: Lane, consumer: str, deliveries: Sequence[Delivery]) -> None:
        """Leave entries, as if never delivered this time, for whoever claims them once the lease is released."""
        self._leave(lane, consumer, consumer, [(each, each.deliveries - 1) for each in deliveries])

    def set_aside(self, lane: Lane, consumer: str, suspects: Sequence[Delivery]) -> None:
        """Leave suspects that were moved to the lane for ``claim``, which hands them out a few at a time."""
        self._leave(lane, consumer, ASIDE, [(each, each.deliveries) for each in suspects])

    def rescue(self, lane: Lane, slot: str, fingerprint: str) -> int:
        """Move requests to ``lane`` from slots that hang or are dead and whose version has no route; how many.

        Does nothing unless ``lane`` is the live one. Streams that began under another fingerprint end at once.
        """
        keys = [f"route:{lane.endpoint}", f"lanes:{lane.endpoint}"]
        limits = (FENCE_S, FRAMES_KEPT, FRAMES_TTL_S)
        args: list[Any] = [lane.endpoint, lane.version, slot, fingerprint, *limits]
        with translated():
            return int(self._lua["rescue"](keys, args))

    def read_oldest(self, lane: Lane) -> int | None:
        """When the request came that waits longest in the lane, on the server's clock; None if none waits."""
        queue = lane.key("q")
        with translated():
            try:
                groups = self._redis.xinfo_groups(queue)
            except redis.ResponseError:  # nobody has asked for anything yet
                return None
            last = next(
                (each["last-delivered-id"] for each in groups if each["name"] == GROUP), "0"
            )
            rows = self._redis.xrange(queue, f"({last}", "+", 1)
        return QueueEntry.from_fields(rows[0][1]).arrival_ms if rows else None

    def read_notices(self, lane: Lane, last_id: str, block_ms: int) -> tuple[str, list[Notice]]:
        """What slots of the lane were told after ``last_id``, and the id to read on from."""
        with translated():
            reply = self._redis.xread({lane.key("ctl"): last_id}, 200, block_ms)
        rows = reply[0][1] if reply else []
        return (rows[-1][0] if rows else last_id), [Notice.from_entry(*row) for row in rows]

    def find_absent(self, gateways: Sequence[str]) -> set[str]:
        """Those gateways whose lease has ended."""
        with translated():
            leases = self._redis.mget([f"gateway:{each}" for each in gateways]) if gateways else []
        return {each for each, lease in zip(gateways, leases, strict=True) if lease is None}

    def _leave(
        self, lane: Lane, consumer: str, heir: str, counted: Sequence[tuple[Delivery, int]]
    ) -> None:
        parts = [part for each, count in counted for part in (each.entry_id, count)]
        with translated():
            self._lua["give_back"]([lane.key("q")], [consumer, heir, *parts])


def _name(lane: Lane) -> str:
    return f"{lane.endpoint}:{lane.version}"


def _pair_up(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _deliver(entry_id: str, deliveries: int, fields: Mapping[str, str]) -> Delivery:
    entry = QueueEntry.from_fields(fields)
    return Delivery(entry_id, entry.count_attempts(deliveries), entry)
