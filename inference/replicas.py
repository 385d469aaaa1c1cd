"""Which slot holds which resident, and how it fares: desired state, leases, readiness, reports.

Level-triggered: a slot asks again and again what it should hold, and compares that with what it has. Nothing is sent
to a slot, so nothing can be lost, and a slot that was away finds the present state when it is back.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from inference.protocol import Resident
from inference.protocol.text import known_fields
from inference.queue import Adoption, Lane, Lease, Queue, QueueUnavailable

logger = logging.getLogger(__name__)

REPORT_TTL_S = 15.0
LOAD_RETRIES_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class SlotState(StrEnum):
    """What a slot is doing; only a ``ready`` one is given requests."""

    WAITING = "waiting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A slot's last report. ``detail`` says why it failed, or what it lacks.

    ``kernel`` is what computes its steps, for people, and ``fingerprint`` a digest over all that may change a token.
    ``probe`` is a digest of its first answers: where fingerprints are equal, it is too. ``kv_blocks`` is what the cache
    has now, ``kv_blocks_full`` what it may grow to. ``loaded_in_s`` runs from adoption to ready, failed tries included.
    ``runtime`` tells interpreter and libraries of a version that has its own, and their digest, which its fingerprint holds.
    Times are epoch seconds of the Redis server; ``retry_at`` is 0 unless a failed load is to be tried again.
    ``telemetry`` is how it did in the last seconds (``Residency.telemetry``); None is what cannot be told.
    """

    slot: str
    endpoint: str = ""
    version: str = ""
    state: SlotState = SlotState.WAITING
    detail: str = ""
    fingerprint: str = ""
    kernel: str = ""
    role: str = ""
    probe: str = ""
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_blocks_full: int = 0
    weight_bytes: int = 0
    loaded_in_s: float = 0.0
    retry_at: float = 0.0
    runtime: str = ""
    updated_at: float = 0.0
    telemetry: Mapping[str, float | None] = field(default_factory=dict)

    def to_json(self) -> str:
        """One report."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, updated_at: float) -> Self:
        """Rebuild from ``to_json``, also of another release; the time is the server's, whatever the slot believed."""
        data = json.loads(text) | {"updated_at": updated_at}
        return cls(**known_fields(cls, data) | {"state": SlotState(data["state"])})

    @property
    def lane(self) -> Lane | None:
        """The lane of the version it holds, if any."""
        return Lane(self.endpoint, self.version) if self.version else None


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """How the loading of a desired version fails, kept until it is loaded or no longer desired.

    ``count`` is of tries in a row, the last of them by ``slot``, which told of it at ``failed_at``. ``retry_at`` is when
    the next may begin; both are epoch seconds of the Redis server. While a try ``is_under_way``, some slot reports that it
    loads this version; if none does, the process of that slot died.
    """

    endpoint: str
    version: str
    artifact: str = ""
    count: int = 1
    retry_at: float = 0.0
    detail: str = ""
    is_under_way: bool = False
    slot: str = ""
    failed_at: float = 0.0

    @property
    def lane(self) -> Lane:
        """The lane of the version."""
        return Lane(self.endpoint, self.version)

    def to_json(self) -> str:
        """The whole milliseconds are for the script that looks whether the next try is due."""
        return json.dumps(asdict(self) | {"retry_at_ms": int(self.retry_at * 1000)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from ``to_json``, also of another release."""
        return cls(**known_fields(cls, json.loads(text)))


def list_failures(queue: Queue) -> list[LoadFailure]:
    """Every desired version that is not loaded after a try or more, or that is being tried; the unreadable are left out.

    Raises:
        QueueUnavailable: Redis cannot be reached.
    """
    failures = [_parse_failure(*each) for each in sorted(queue.read_failures().items())]
    return [failure for failure in failures if failure is not None]


def list_slots(queue: Queue) -> list[SlotStatus]:
    """Every slot that reported within the last ``REPORT_TTL_S`` seconds, by name; unreadable reports are left out.

    Raises:
        QueueUnavailable: Redis cannot be reached.
    """
    now, reports = queue.read_reports()
    statuses = [
        _parse_status(slot, at, report)
        for slot, (at, report) in sorted(reports.items())
        if now - at <= REPORT_TTL_S
    ]
    return [status for status in statuses if status is not None]


class ServerClock:
    """The Redis server's clock, on which arrivals and deadlines are told, in terms of ``time.monotonic()``."""

    def __init__(self) -> None:
        """Until the first ``sync`` this machine's own clock has to do."""
        self._ahead_s = time.time() - time.monotonic()

    def sync(self, server_s: float, *, at: float) -> None:
        """The server's clock showed ``server_s`` at ``at`` of ``time.monotonic()``."""
        self._ahead_s = server_s - at

    def to_server(self, monotonic_s: float) -> float:
        """What the server shows, in epoch seconds, when ``time.monotonic()`` shows ``monotonic_s``."""
        return monotonic_s + self._ahead_s

    def to_monotonic(self, server_ms: int) -> float:
        """When ``time.monotonic()`` shows what the server shows at ``server_ms``."""
        return server_ms / 1000 - self._ahead_s


class Member:
    """A slot's membership: its lease, the name it consumes under, the resident it holds, and what it reports.

    Safe to share between threads: a renewal never brings back what ``leave`` gave up. The consumer's name is new after
    every residency and after every lost lease, because what was delivered under the old one may be running elsewhere.
    """

    def __init__(self, queue: Queue, slot: str, *, lease_ms: int, handover: str = "") -> None:
        """With the ``handover`` of a process that was replaced by this one, its lease and its claim go on."""
        self._queue = queue
        self._lock = threading.RLock()
        left = json.loads(handover) if handover else {}
        self._lease = Lease(slot, left.get("consumer") or _new_consumer(slot), lease_ms)
        self._has_lease = False
        self._settled_at = 0.0
        self.status = SlotStatus(slot)
        if left:
            self.status = SlotStatus.from_json(left["status"], updated_at=0.0)
        self.clock = ServerClock()

    @property
    def slot(self) -> str:
        """The slot's own name, which outlives its leases."""
        return self._lease.slot

    @property
    def consumer(self) -> str:
        """The name this slot consumes under now."""
        return self._lease.consumer

    def report(
        self, state: SlotState, *, detail: str = "", retry_at: float = 0.0, **facts: Any
    ) -> None:
        """Change what the next renewal reports; ``facts`` are other fields of ``SlotStatus``."""
        self.note(state=state, detail=detail, retry_at=retry_at, **facts)

    def note(self, **facts: Any) -> None:
        """Change some fields of what the next renewal reports."""
        with self._lock:
            self.status = replace(self.status, **facts)

    def renew(self) -> bool:
        """Renew lease, readiness and report. False: the lease is lost for good, and ``rejoin`` is due.

        A lease that merely ran out, with nothing taken over, is renewed.
        """
        with self._lock:
            status = self.status
            is_ready = status.state is SlotState.READY
            asked_at = time.monotonic()
            renewal = self._queue.renew(
                self._lease, status.to_json(), status.lane, is_ready=is_ready
            )
            if renewal is None:
                return False
            if self._has_lease and not renewal.stood:
                self.unsettle()
            self._has_lease = True
        self.clock.sync(renewal.server_s, at=(asked_at + time.monotonic()) / 2)
        return True

    def adopt(self) -> Resident | None:
        """Claim the most wanted resident that no slot holds, if there is one; the lease must stand.

        For the time of a lease after Redis was away, or had lost its memory, nothing is claimed: those who hold
        something come first, and say so again.

        Raises:
            QueueUnavailable: Redis cannot be reached.
        """
        with self._lock:
            if time.monotonic() < self._settled_at:
                return None
            adoption = self._queue.adopt(self.consumer, None)
            if not adoption.is_published:
                self.unsettle()
            resident = adoption.resident
            if resident is None:
                self.status = SlotStatus(self.slot)
            else:
                self.status = SlotStatus(
                    self.slot,
                    resident.endpoint,
                    resident.version,
                    SlotState.LOADING,
                    role=resident.role,
                )
            return resident

    def unsettle(self) -> None:
        """Redis was away, or has lost its memory."""
        self._settled_at = time.monotonic() + self._lease.lease_ms / 1000

    def look_up(self, resident: Resident) -> Adoption:
        """Whether ``resident`` is still desired and ours, perhaps in another role; unknown counts as yes.

        What would have to be loaded anew is not the same any more.
        """
        lane = Lane(resident.endpoint, resident.version)
        with self._lock:
            adoption = self._queue.adopt(self.consumer, lane)
            if not adoption.is_published:
                return replace(adoption, resident=resident)
            found = adoption.resident
            if found is None or not found.is_same_load(resident):
                return replace(adoption, resident=None)
            self.note(role=found.role)
            return adoption

    def hand_over(self, lease_ms: int) -> str:
        """Keep lease and claim for ``lease_ms``, and return what the process needs that goes on with them.

        Where they are lost already, that process finds out as this one would.

        Raises:
            QueueUnavailable: Redis cannot be reached.
        """
        with self._lock:
            lease, report = replace(self._lease, lease_ms=lease_ms), self.status.to_json()
            self._queue.renew(lease, report, self.status.lane, is_ready=False)
            return json.dumps({"consumer": self.consumer, "status": report})

    def oldest_waiting_at(self) -> float | None:
        """When, on ``time.monotonic()``, the request came that waits longest in its lane; None if none waits, or nobody knows."""
        lane = self.status.lane
        with suppress(QueueUnavailable):
            arrival_ms = self._queue.read_oldest(lane) if lane else None
            return None if arrival_ms is None else self.clock.to_monotonic(arrival_ms)
        return None

    def begin_load(self, resident: Resident, num_tries: int) -> LoadFailure:
        """Count a try before it is made, because it may end this process; the failure that it is if nothing follows.

        ``num_tries`` is what this process knows of; others may know more.
        """
        failure = LoadFailure(
            *(resident.endpoint, resident.version, resident.artifact, num_tries, 0.0),
            "the process ended while it loaded this version; perhaps there was no memory left",
            is_under_way=True,
            slot=self.slot,
        )
        with suppress(QueueUnavailable):
            # Before the try is counted: one that no slot reports is taken for one whose process died.
            self.renew()
            before = self._read_failure(failure.lane)
            if before is not None and before.artifact == failure.artifact:
                failure = replace(failure, count=max(before.count + 1, num_tries))
        return self._put_failure(failure)

    def fail_load(self, failure: LoadFailure, detail: str) -> LoadFailure:
        """A try failed: tell everybody how, and when the next is due."""
        return self._put_failure(replace(failure, detail=detail, is_under_way=False))

    def end_load(self, failure: LoadFailure) -> None:
        """The version is loaded: forget how that failed."""
        with suppress(QueueUnavailable):
            self._queue.put_failure(failure.lane, None)

    def _read_failure(self, lane: Lane) -> LoadFailure | None:
        name = f"{lane.endpoint}:{lane.version}"
        text = self._queue.read_failures().get(name)
        return _parse_failure(name, text) if text else None

    def _put_failure(self, failure: LoadFailure) -> LoadFailure:
        delay_s = LOAD_RETRIES_S[min(failure.count, len(LOAD_RETRIES_S)) - 1]
        now = self.clock.to_server(time.monotonic())
        failure = replace(failure, failed_at=now, retry_at=now + delay_s)
        with suppress(QueueUnavailable):  # then it is known here alone
            self._queue.put_failure(failure.lane, failure.to_json())
        return failure

    def rejoin(self) -> None:
        """Take a new consumer name; the next renewal makes it a lease."""
        with self._lock:
            self._has_lease = False
            self._lease = replace(self._lease, consumer=_new_consumer(self.slot))

    def leave(self) -> None:
        """Give up lease, readiness and resident at once; entries still held are free for others.

        Raises:
            QueueUnavailable: Redis was not told, and will find out when the lease ends.
        """
        with self._lock:
            lane = self.status.lane
            self.status = SlotStatus(self.slot)
            try:
                self._queue.release(self._lease, lane)
            finally:
                self.rejoin()


def _parse_failure(name: str, text: str) -> LoadFailure | None:
    try:
        return LoadFailure.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("load failure cannot be read version=%s error=%r", name, error)
        return None


def _parse_status(slot: str, updated_at: float, report: str) -> SlotStatus | None:
    try:
        return SlotStatus.from_json(report, updated_at=updated_at)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("report cannot be read slot=%s error=%r", slot, error)
        return None


def _new_consumer(slot: str) -> str:
    return f"{slot}.{secrets.token_hex(4)}"
