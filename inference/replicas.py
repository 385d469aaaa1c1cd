"""Which slot holds which resident, and how it fares: desired state, leases, readiness, reports.

Level-triggered: a slot asks again and again what it should hold, and compares that with what it has. Nothing is sent
to a slot, so nothing can be lost, and a slot that was away finds the present state when it is back.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Self

from inference.protocol import Resident
from inference.queue import Lane, Lease, Queue

REPORT_TTL_S = 15.0


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
    """A slot's last report. ``detail`` says why it failed; ``updated_at`` is epoch seconds of the Redis server."""

    slot: str
    endpoint: str = ""
    version: str = ""
    state: SlotState = SlotState.WAITING
    detail: str = ""
    fingerprint: str = ""
    updated_at: float = 0.0

    def to_json(self) -> str:
        """One report."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, updated_at: float) -> Self:
        """Rebuild from ``to_json``; the time is the server's, whatever the slot believed."""
        fields = json.loads(text) | {"updated_at": updated_at}
        return cls(**fields | {"state": SlotState(fields["state"])})

    @property
    def lane(self) -> Lane | None:
        """The lane of the version it holds, if any."""
        return Lane(self.endpoint, self.version) if self.version else None


def list_slots(queue: Queue) -> list[SlotStatus]:
    """Every slot that reported within the last ``REPORT_TTL_S`` seconds, by name.

    Raises:
        QueueUnavailable: Redis cannot be reached.
    """
    now, reports = queue.read_reports()
    return [
        SlotStatus.from_json(report, updated_at=at)
        for slot, (at, report) in sorted(reports.items())
        if now - at <= REPORT_TTL_S
    ]


class ServerClock:
    """The Redis server's clock, on which arrivals and deadlines are told, in terms of ``time.monotonic()``."""

    def __init__(self) -> None:
        """Until the first ``sync`` this machine's own clock has to do."""
        self._ahead_s = time.time() - time.monotonic()

    def sync(self, server_s: float, *, at: float) -> None:
        """The server's clock showed ``server_s`` at ``at`` of ``time.monotonic()``."""
        self._ahead_s = server_s - at

    def to_monotonic(self, server_ms: int) -> float:
        """When ``time.monotonic()`` shows what the server shows at ``server_ms``."""
        return server_ms / 1000 - self._ahead_s


class Member:
    """A slot's membership: its lease, the name it consumes under, the resident it holds, and what it reports.

    Safe to share between threads: a renewal never brings back what ``leave`` gave up. The consumer's name is new after
    every residency and after every lost lease, because what was delivered under the old one may be running elsewhere.
    """

    def __init__(self, queue: Queue, slot: str, *, lease_ms: int) -> None:
        self._queue = queue
        self._lock = threading.RLock()
        self._lease = Lease(slot, _new_consumer(slot), lease_ms)
        self.status = SlotStatus(slot)
        self.clock = ServerClock()

    @property
    def slot(self) -> str:
        """The slot's own name, which outlives its leases."""
        return self._lease.slot

    @property
    def consumer(self) -> str:
        """The name this slot consumes under now."""
        return self._lease.consumer

    def report(self, state: SlotState, *, detail: str = "", fingerprint: str | None = None) -> None:
        """Change what the next renewal reports."""
        with self._lock:
            known = self.status.fingerprint if fingerprint is None else fingerprint
            self.status = replace(self.status, state=state, detail=detail, fingerprint=known)

    def renew(self) -> bool:
        """Renew lease, readiness and report. False: the lease is lost for good, and ``rejoin`` is due.

        A lease that merely ran out, with nothing taken over, is renewed.
        """
        with self._lock:
            status = self.status
            is_ready = status.state is SlotState.READY
            asked_at = time.monotonic()
            server_s = self._queue.renew(
                self._lease, status.to_json(), status.lane, is_ready=is_ready
            )
        if server_s is None:
            return False
        self.clock.sync(server_s, at=(asked_at + time.monotonic()) / 2)
        return True

    def adopt(self) -> Resident | None:
        """Claim a desired resident that no slot holds, if there is one; the lease must stand."""
        with self._lock:
            _, resident = self._queue.adopt(self.consumer, None)
            if resident is not None:
                self.status = SlotStatus(
                    self.slot, resident.endpoint, resident.version, SlotState.LOADING
                )
            return resident

    def still_holds(self, resident: Resident) -> bool:
        """Whether ``resident`` is still desired, unchanged, and ours; unknown counts as yes."""
        lane = Lane(resident.endpoint, resident.version)
        with self._lock:
            is_published, held = self._queue.adopt(self.consumer, lane)
        return not is_published or held == resident

    def rejoin(self) -> None:
        """Take a new consumer name; the next renewal makes it a lease."""
        with self._lock:
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


def _new_consumer(slot: str) -> str:
    return f"{slot}.{secrets.token_hex(4)}"
