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
from inference.queue.lanes import (
    Adoption,
    Applied,
    Delivery,
    Lane,
    LaneCount,
    Lease,
    LogEntry,
    Notice,
    Renewal,
)
from inference.queue.link import CONNECTION, create_group, read_lua, translated

logger = logging.getLogger(__name__)

FENCE_S = 86_400  # longer than any process sleeps and wakes
LATE_S = (
    3  # how long an incarnation that ended is refused: less than a reconciler needs to set it right
)
FRAMES_KEPT = 5_000
FRAMES_TTL_S = 120
DEAD_KEPT = 1_000

_GROUP = "slots"
_LOG_GROUP = "intake"
_ASIDE = "aside"  # holds suspects until a slot claims them; it never has a lease
_SCRIPTS = ("adopt", "apply", "claim", "give_back", "renew", "rescue")
# Sent as text: inside a pipeline nobody could load them again.
_PIPED = ("requeue", "send", "settle")


class Queue:
    """The blocking connection; safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Connects on first use. ``url`` is ``redis://[:password@]host:port/db`` (or ``rediss``, ``unix``)."""
        self._redis: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **CONNECTION)
        self._lua = {name: self._redis.register_script(read_lua(name)) for name in _SCRIPTS}
        self._piped = {name: read_lua(name) for name in _PIPED}

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

    def apply_route(self, route: Route, *, in_flight: str = "finish") -> Applied:
        """Make ``route`` the state of its endpoint, and move what waits on lanes it does not name to the live one.

        ``in_flight`` says how requests end that slots have in their hands on such lanes: they ``finish`` where they
        are; ``retry_if_no_token`` those go to the live version that have sent no token; ``cut`` ends the others with
        an error as well. It is told once per generation. Everything else may be repeated, late, or out of order.
        """
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
        head = (route.endpoint, route.incarnation, route.generation, in_flight, LATE_S)
        keys = [f"route:{route.endpoint}", "endpoints", f"lanes:{route.endpoint}"]
        with translated():
            is_current, num_requeued, num_in_flight = self._lua["apply"](keys, [*head, *flat])
        return Applied(bool(is_current), num_requeued, num_in_flight)

    def read_lanes(self, endpoint: str) -> list[LaneCount]:
        """What waits and what runs on every lane of an endpoint that is routed or not empty, by version."""
        with translated():
            versions = sorted(self._redis.smembers(f"lanes:{endpoint}"))
            pipe = self._redis.pipeline(transaction=True)
            for version in versions:
                queue = Lane(endpoint, version).key("q")
                pipe.xlen(queue).xpending(queue, _GROUP)
            replies = pipe.execute(raise_on_error=False)
        counts = zip(replies[::2], replies[1::2], strict=True)
        return [
            LaneCount(version, length - held, held)
            for version, (length, pending) in zip(versions, counts, strict=True)
            for held in [_count_held(pending)]
        ]

    def read_route(self, endpoint: str) -> Route | None:
        """The route as last applied, or None."""
        with translated():
            text = self._redis.hget(f"route:{endpoint}", "route")
        return Route.from_json(text) if text else None

    def read_endpoints(self) -> list[str]:
        """Names of all routed endpoints, sorted."""
        with translated():
            return sorted(self._redis.smembers("endpoints"))

    def withdraw_route(self, endpoint: str) -> None:
        """Let gateways no longer know an endpoint; what waits on its lanes ends by its deadline."""
        with translated(), self._redis.pipeline(transaction=True) as pipe:
            pipe.srem("endpoints", endpoint).delete(f"route:{endpoint}").execute()

    def publish_desired(self, residents: Sequence[Resident]) -> None:
        """Say which versions slots should hold; naming one n times asks for n replicas."""
        with translated():
            self._redis.set("desired", json.dumps([asdict(resident) for resident in residents]))

    def read_desired(self) -> list[Resident] | None:
        """The residents as last published, or None if none ever were (or Redis lost them)."""
        with translated():
            text = self._redis.get("desired")
        return None if text is None else _read_residents(text)

    def put_keys(self, json_texts: Mapping[str, str]) -> None:
        """Let gateways accept these API keys, and from now on refuse those that they do not find."""
        keys = {f"key:{key_id}": text for key_id, text in json_texts.items()}
        with translated():
            self._redis.mset(keys | {"keys": "published"})

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
        resident = None if index < 0 else _read_residents(text)[index]
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
        rows = self._read_group(_GROUP, consumer, lane.key("q"), ">", count, block_ms)
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
                pending = self._redis.xpending_range(queue, _GROUP, "-", "+", 1000, consumer)
            except redis.ResponseError as error:
                create_group(self._redis, queue, _GROUP, error)
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
        self._leave(lane, consumer, _ASIDE, [(each, each.deliveries) for each in suspects])

    def rescue(self, lane: Lane, slot: str, fingerprint: str) -> int:
        """Move requests to ``lane`` from slots that hang or are dead and whose version has no route; how many.

        Does nothing unless ``lane`` is the live one. Streams that began under another fingerprint end at once.
        """
        keys = [f"route:{lane.endpoint}", f"lanes:{lane.endpoint}"]
        limits = (FENCE_S, FRAMES_KEPT, FRAMES_TTL_S)
        args: list[Any] = [lane.endpoint, lane.version, slot, fingerprint, *limits]
        with translated():
            return int(self._lua["rescue"](keys, args))

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

    def _pipe(self, pipe: Any, name: str, keys: Sequence[str], *args: Any) -> None:
        pipe.eval(self._piped[name], len(keys), *keys, *args)

    def _read_group(
        self, group: str, consumer: str, stream: str, start: str, count: int, block_ms: int | None
    ) -> list[tuple[str, dict[str, str]]]:
        # Redis may lose its memory while the second read waits, too: then the caller, who asks for ever, asks again.
        for _ in range(2):
            with translated():
                try:
                    reply = self._redis.xreadgroup(
                        group, consumer, {stream: start}, count, block_ms
                    )
                except redis.ResponseError as error:
                    create_group(self._redis, stream, group, error)
                else:
                    return reply[0][1] if reply else []
        return []


def _read_residents(text: str) -> list[Resident]:
    return [Resident(**fields) for fields in json.loads(text)]


def _name(lane: Lane) -> str:
    return f"{lane.endpoint}:{lane.version}"


def _pair_up(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _deliver(entry_id: str, deliveries: int, fields: Mapping[str, str]) -> Delivery:
    entry = QueueEntry.from_fields(fields)
    return Delivery(entry_id, entry.count_attempts(deliveries), entry)


def _count_held(pending: Any) -> int:
    """How many entries slots have in their hands; none where no slot ever asked for any."""
    if isinstance(pending, redis.ResponseError):
        return 0
    aside = [each["pending"] for each in pending["consumers"] if each["name"] == _ASIDE]
    return int(pending["pending"] - sum(aside))
