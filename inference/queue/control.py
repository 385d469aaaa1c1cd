"""What the control plane asks of Redis: routes, residents, keys, the request log."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import redis

from inference.protocol import FeedbackRecord, Resident, Route, read_record
from inference.queue.connection import Connection
from inference.queue.lanes import (
    ASIDE,
    GROUP,
    Applied,
    DeadLetter,
    Lane,
    LaneCount,
    LogEntry,
    read_residents,
)
from inference.queue.link import translated

logger = logging.getLogger(__name__)

LATE_S = (
    3  # how long an incarnation that ended is refused: less than a reconciler needs to set it right
)

_LOG_GROUP = "intake"


class ControlCalls(Connection):
    """The calls of the control plane."""

    def apply_route(self, route: Route, *, in_flight: str = "finish") -> Applied:
        """Make ``route`` the state of its endpoint, and move what waits on lanes it does not name to the live one.

        ``in_flight`` says how requests end that slots have in their hands on such lanes: they ``finish`` where they
        are; ``retry_if_no_token`` those go to the live version that have sent no token; ``cut`` ends the others with
        an error as well. Only lanes that lose their route by this call are told, so that a repeat tells nobody again.
        Everything may be repeated, late, or out of order.
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
            "rollout": route.rollout,
            "shadow_bp": route.shadow_bp,
            "self_bp": route.self_bp,
            "score_bp": route.score_bp,
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
                pipe.xlen(queue).xpending(queue, GROUP)
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
        return None if text is None else read_residents(text)

    def put_keys(self, json_texts: Mapping[str, str]) -> None:
        """Let gateways accept these API keys, and from now on refuse those that they do not find."""
        keys = {f"key:{key_id}": text for key_id, text in json_texts.items()}
        with translated():
            self._redis.mset(keys | {"keys": "published"})

    def read_dead(self, count: int, *, before: str = "") -> list[DeadLetter]:
        """Up to ``count`` dead letters, the newest first; with ``before`` those older than the letter of that id."""
        newest = f"({before}" if before else "+"
        with translated():
            rows = self._redis.xrevrange("dead", newest, "-", count)
        return [DeadLetter.from_entry(*row) for row in rows]

    def count_dead(self) -> int:
        """How many dead letters there ever were, also those that made room for newer ones."""
        with translated():
            try:
                return int(self._redis.xinfo_stream("dead")["entries-added"])
            except redis.ResponseError as error:
                if "no such key" not in str(error):
                    raise
        return 0

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
                entries.append(LogEntry(entry_id, read_record((fields or {})["record"])))
            except (KeyError, TypeError, ValueError):  # trimmed, or of a release we do not know
                logger.exception("log entry dropped entry_id=%s", entry_id)
                broken.append(entry_id)
        self.ack_log(broken)
        return entries

    def append_feedback(self, records: Sequence[FeedbackRecord]) -> None:
        """Put what came before its request was logged back to the end of the log."""
        with translated(), self._redis.pipeline(transaction=False) as pipe:
            for record in records:
                pipe.xadd("log", {"record": record.to_json()})
            pipe.execute()

    def ack_log(self, entry_ids: Sequence[str]) -> None:
        """The records are stored elsewhere: acknowledge and delete them."""
        if entry_ids:
            with translated(), self._redis.pipeline(transaction=True) as pipe:
                pipe.xack("log", _LOG_GROUP, *entry_ids).xdel("log", *entry_ids).execute()


def _count_held(pending: Any) -> int:
    """How many entries slots have in their hands; none where no slot ever asked for any."""
    if isinstance(pending, redis.ResponseError):
        return 0
    aside = [each["pending"] for each in pending["consumers"] if each["name"] == ASIDE]
    return int(pending["pending"] - sum(aside))
