"""The blocking connection of slots and control plane."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference.protocol import QueueEntry, RequestRecord, Resident, Route, StepFrame
from inference.queue.lanes import Delivery, Lane, Lease, LogEntry
from inference.queue.link import CONNECTION, create_group, read_lua, translated

logger = logging.getLogger(__name__)

FENCE_S = 86_400  # longer than any process sleeps and wakes
FRAMES_KEPT = 5_000
FRAMES_TTL_S = 120
DEAD_KEPT = 1_000

_GROUP = "slots"
_LOG_GROUP = "intake"
_SCRIPTS = ("adopt", "apply", "claim", "renew")


class Queue:
    """The blocking connection; safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Connects on first use. ``url`` is ``redis://[:password@]host:port/db`` (or ``rediss``, ``unix``)."""
        self._redis: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **CONNECTION)
        self._lua = {name: self._redis.register_script(read_lua(name)) for name in _SCRIPTS}
        self._settle = read_lua(
            "settle"
        )  # sent as text: inside a pipeline nobody could load it again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; the next call would open new ones."""
        self._redis.close()

    def ping(self) -> None:
        """Return if Redis answers."""
        with translated():
            self._redis.ping()

    # ------------------------------------------------------------------------------------------ control plane

    def apply_route(self, route: Route) -> bool:
        """Make ``route`` the state of its endpoint. False: a later generation of the incarnation is there already."""
        fields = {
            "route": route.to_json(),
            "live": route.live,
            "candidate": route.candidate,
            "canary_bp": route.canary_bp,
            "salt": route.salt,
            "queue_cap": route.queue_cap,
            "deadline_ms": int(route.deadline_s * 1000),
            "store_texts": int(route.store_texts),
        }
        flat: list[Any] = [part for pair in fields.items() for part in pair]
        args: list[Any] = [route.endpoint, route.incarnation, route.generation, *flat]
        with translated():
            return bool(self._lua["apply"]([f"route:{route.endpoint}", "endpoints"], args))

    def read_route(self, endpoint: str) -> Route | None:
        """The route as last applied, or None."""
        with translated():
            text = self._redis.hget(f"route:{endpoint}", "route")
        return Route.from_json(text) if text else None

    def publish_desired(self, residents: Sequence[Resident]) -> None:
        """Say which versions slots should hold; naming one n times asks for n replicas."""
        with translated():
            self._redis.set("desired", json.dumps([asdict(resident) for resident in residents]))

    def read_desired(self) -> list[Resident] | None:
        """The residents as last published, or None if none ever were (or Redis lost them)."""
        with translated():
            text = self._redis.get("desired")
        return None if text is None else _read_residents(text)

    def put_key(self, key_id: str, json_text: str) -> None:
        """Let gateways accept an API key."""
        with translated():
            self._redis.set(f"key:{key_id}", json_text)

    def delete_key(self, key_id: str) -> None:
        """Let gateways refuse an API key; an unknown one is fine."""
        with translated():
            self._redis.delete(f"key:{key_id}")

    def read_log(self, consumer: str, count: int) -> list[LogEntry]:
        """Up to ``count`` records of the request log: first those this consumer read and never acknowledged."""
        for start in ("0", ">"):
            rows = self._read_group(_LOG_GROUP, consumer, "log", start, count, None)
            if entries := self._parse_log(rows):
                return entries
        return []

    def _parse_log(self, rows: Sequence[tuple[str, dict[str, str] | None]]) -> list[LogEntry]:
        entries, broken = [], []
        for entry_id, fields in rows:
            try:
                entries.append(
                    LogEntry(entry_id, RequestRecord.from_json((fields or {})["record"]))
                )
            except (KeyError, TypeError, ValueError):  # trimmed, or of a release we do not know
                logger.exception("log entry dropped entry_id=%s", entry_id)
                broken.append(entry_id)
        self.ack_log(broken)
        return entries

    def ack_log(self, entry_ids: Sequence[str]) -> None:
        """The records are stored elsewhere: acknowledge and delete them."""
        if entry_ids:
            with translated(), self._redis.pipeline(transaction=True) as pipe:
                pipe.xack("log", _LOG_GROUP, *entry_ids).xdel("log", *entry_ids).execute()

    # ------------------------------------------------------------------------------- slots: membership and state

    def renew(
        self, lease: Lease, report: str, lane: Lane | None, *, is_ready: bool
    ) -> float | None:
        """Renew lease, readiness and report at once; the server's clock in seconds, or None if the lease is lost."""
        ready_key = lane.key("ready") if lane else ""
        keys = [f"slot:{lease.consumer}", f"fenced:{lease.consumer}", "slots", ready_key]
        with translated():
            now_us = self._lua["renew"](keys, [lease.slot, lease.lease_ms, report, int(is_ready)])
        return now_us / 1e6 if now_us else None

    def release(self, lease: Lease, lane: Lane | None) -> None:
        """End a lease early: what the consumer still has is free for others at once."""
        with translated(), self._redis.pipeline(transaction=True) as pipe:
            if lane:
                pipe.zrem(lane.key("ready"), lease.slot)
            pipe.hdel("slots", lease.slot).delete(f"slot:{lease.consumer}").execute()

    def adopt(self, consumer: str, holding: Lane | None) -> tuple[bool, Resident | None]:
        """The resident that ``consumer`` holds now: its own, else a free one (only of ``holding``, if given).

        The first part is False while no desired residents are published; then nothing changes.
        """
        wish = f"{holding.endpoint}:{holding.version}" if holding else ""
        with translated():
            reply = self._lua["adopt"](["desired", "residents"], [consumer, wish])
        if reply is None:
            return False, None
        text, index = reply
        return True, None if index < 0 else _read_residents(text)[index]

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
        """Take up to ``count`` new entries, waiting up to ``block_ms`` for the first."""
        rows = self._read_group(_GROUP, consumer, lane.key("q"), ">", count, block_ms)
        return [Delivery(entry_id, 1, QueueEntry.from_fields(row)) for entry_id, row in rows]

    def claim(self, lane: Lane, consumer: str, count: int, last_attempt: int) -> list[Delivery]:
        """Take over up to ``count`` entries of consumers without a lease; one on its last attempt comes alone."""
        with translated():
            try:
                rows = self._lua["claim"]([lane.key("q")], [consumer, count, last_attempt, FENCE_S])
            except redis.ResponseError as error:
                create_group(self._redis, lane.key("q"), _GROUP, error)
                return []
        return [
            Delivery(entry_id, attempt, QueueEntry.from_fields(_pair_up(flat)))
            for entry_id, attempt, flat in rows
        ]

    def find_unheard(self, lane: Lane, consumer: str, known: set[str]) -> list[Delivery]:
        """Entries that were delivered to ``consumer`` in a reply it never got; ``known`` are those it has."""
        queue = lane.key("q")
        with translated():
            try:
                pending = self._redis.xpending_range(queue, _GROUP, "-", "+", 1000, consumer)
            except redis.ResponseError as error:
                create_group(self._redis, queue, _GROUP, error)
                return []
            unheard = [row for row in pending if row["message_id"] not in known]
            found = [
                self._redis.xrange(queue, row["message_id"], row["message_id"]) for row in unheard
            ]
        return [
            Delivery(row["message_id"], row["times_delivered"], QueueEntry.from_fields(entry[0][1]))
            for row, entry in zip(unheard, found, strict=True)
            if entry
        ]

    def read_bodies(self, request_ids: Sequence[str]) -> list[str | None]:
        """The bodies in order; None where a request was cancelled, ended, or is long past its deadline."""
        with translated():
            bodies: list[str | None] = self._redis.mget([f"req:{each}" for each in request_ids])
        return bodies

    def send(
        self,
        lane: Lane,
        consumer: str,
        frames: Mapping[str, StepFrame],
        *,
        ended: Sequence[Delivery] = (),
        dead: Sequence[Delivery] = (),
    ) -> None:
        """Send one frame per gateway, then end entries. May be repeated: gateways drop repeated rows."""
        with translated(), self._redis.pipeline(transaction=False) as pipe:
            for gateway, frame in frames.items():
                pipe.xadd(f"out:{gateway}", {"frame": frame.to_json()}, maxlen=FRAMES_KEPT)
                pipe.expire(f"out:{gateway}", FRAMES_TTL_S)
            for delivery in dead:
                letter = delivery.entry.to_fields() | asdict(lane) | {"attempt": delivery.attempt}
                pipe.xadd("dead", letter, maxlen=DEAD_KEPT)
            if ended:
                parts = [part for each in ended for part in (each.entry_id, each.entry.id)]
                keys = (lane.key("q"), lane.key("ended"))
                pipe.eval(self._settle, len(keys), *keys, consumer, *parts)
            pipe.execute()

    def give_back(self, lane: Lane, consumer: str, deliveries: Sequence[Delivery]) -> None:
        """Leave entries, as if never delivered this time, for whoever claims them once the lease is released."""
        with translated(), self._redis.pipeline(transaction=True) as pipe:
            for each in deliveries:
                count = each.attempt - 1
                pipe.xclaim(
                    lane.key("q"),
                    _GROUP,
                    consumer,
                    0,
                    [each.entry_id],
                    retrycount=count,
                    justid=True,
                )
            pipe.execute()

    def read_cancels(self, lane: Lane, last_id: str, block_ms: int) -> tuple[str, list[str]]:
        """Request ids cancelled after ``last_id``, and the id to read on from."""
        with translated():
            reply = self._redis.xread({lane.key("ctl"): last_id}, 200, block_ms)
        rows = reply[0][1] if reply else []
        return (rows[-1][0] if rows else last_id), [fields["id"] for _, fields in rows]

    def find_absent(self, gateways: Sequence[str]) -> set[str]:
        """Those gateways whose lease has ended."""
        with translated():
            leases = self._redis.mget([f"gateway:{each}" for each in gateways]) if gateways else []
        return {each for each, lease in zip(gateways, leases, strict=True) if lease is None}

    def _read_group(
        self, group: str, consumer: str, stream: str, start: str, count: int, block_ms: int | None
    ) -> list[tuple[str, dict[str, str]]]:
        def read() -> Any:
            return self._redis.xreadgroup(group, consumer, {stream: start}, count, block_ms)

        with translated():
            try:
                reply = read()
            except redis.ResponseError as error:
                create_group(self._redis, stream, group, error)
                reply = read()
        return reply[0][1] if reply else []


def _read_residents(text: str) -> list[Resident]:
    return [Resident(**fields) for fields in json.loads(text)]


def _pair_up(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
