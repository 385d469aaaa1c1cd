"""What slots report of an endpoint's versions: who is ready, how full the lanes are, what a version lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.endpoints.routing import EndpointState
from inference.queue import LaneCount, Queue
from inference.replicas import LoadFailure, SlotState, SlotStatus, list_failures, list_slots

# A slot reports twice a second, and its lease ends 2 s after its last report. One that is silent for half a second
# more hangs or is gone, whatever it said last: others take over what it had.
SILENT_AFTER_S = 2.5


@dataclass(frozen=True, slots=True)
class Report:
    """One look at Redis: every slot, how full each lane of each endpoint is, and what could not be loaded."""

    slots: Sequence[SlotStatus] = ()
    lanes: Mapping[str, Sequence[LaneCount]] = field(default_factory=dict)
    failures: Sequence[LoadFailure] = ()

    def slots_of(self, endpoint: str, version: str) -> tuple[SlotStatus, ...]:
        """The slots that hold ``version`` for ``endpoint``, or are about to."""
        return tuple(
            slot for slot in self.slots if (slot.endpoint, slot.version) == (endpoint, version)
        )

    def ready_versions(self, endpoint: str) -> frozenset[str]:
        """Names of the versions that a slot holds ready for ``endpoint``."""
        return frozenset(
            slot.version
            for slot in self.slots
            if slot.endpoint == endpoint and slot.state == SlotState.READY
        )

    def tell_missing(self, endpoint: str, version: str, *, has_role: bool) -> str:
        """Why no slot can answer with ``version``, and the way on; slots load only what has a role."""
        if holders := self.slots_of(endpoint, version):
            return "no slot holds it ready: " + ", ".join(_tell(slot) for slot in holders)
        if failure := self._failure_of(endpoint, version):
            return f"no slot holds it, because it could not be loaded: {failure.detail}"
        if has_role:
            return "no slot holds it yet; a free one takes it within seconds, and with none free it waits"
        return "no slot holds it; make it the candidate first, and promote it when it is ready"

    def holders_of(self, version: str) -> list[SlotStatus]:
        """The slots that hold ``version``, or are about to, for whatever endpoint."""
        return [slot for slot in self.slots if slot.version == version]

    def failures_of(self, version: str) -> list[LoadFailure]:
        """How loading ``version`` fails, for each endpoint that wants it."""
        return [failure for failure in self.failures if failure.version == version]

    def _failure_of(self, endpoint: str, version: str) -> LoadFailure | None:
        found = (
            each for each in self.failures if (each.endpoint, each.version) == (endpoint, version)
        )
        return next(found, None)


@dataclass(frozen=True, slots=True)
class RoleReadiness:
    """One role of an endpoint: the slots that hold its version, and how many requests wait and run there."""

    role: str
    version: str
    slots: tuple[SlotStatus, ...]
    queued: int | None = None
    in_flight: int | None = None
    missing: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether at least one slot answers."""
        return any(slot.state == SlotState.READY for slot in self.slots)


def read_slots(*, queue: Queue) -> list[SlotStatus]:
    """Every slot that has reported lately; a ready one that fell silent counts as failed.

    Raises:
        QueueUnavailable: Redis is away.
    """
    now, _ = queue.read_reports()
    return _seen_at(now, list_slots(queue))


def read_failures(*, queue: Queue) -> list[LoadFailure]:
    """Every version that a slot should hold and could not load.

    Raises:
        QueueUnavailable: Redis is away.
    """
    now, _ = queue.read_reports()
    return _failed_at(now, queue)


def read_report(*, queue: Queue, endpoints: Iterable[str] = ()) -> Report:
    """What slots say now, with the lanes of ``endpoints``.

    Raises:
        QueueUnavailable: Redis is away.
    """
    now, _ = queue.read_reports()
    return Report(
        slots=_seen_at(now, list_slots(queue)),
        lanes={name: queue.read_lanes(name) for name in endpoints},
        failures=_failed_at(now, queue),
    )


def readiness(*, state: EndpointState, report: Report) -> list[RoleReadiness]:
    """For each filled role: which slots hold its version, and in what state they are."""
    lanes = {lane.version: lane for lane in report.lanes.get(state.name, ())}
    found = []
    for role, placed in state.placed().items():
        lane = lanes.get(placed.name)
        readiness = RoleReadiness(
            role,
            placed.name,
            report.slots_of(state.name, placed.name),
            queued=lane.num_queued if lane else 0,
            in_flight=lane.num_in_flight if lane else 0,
        )
        if not readiness.is_ready:
            missing = report.tell_missing(state.name, placed.name, has_role=True)
            readiness = replace(readiness, missing=missing)
        found.append(readiness)
    return found


def _tell(slot: SlotStatus) -> str:
    return f"{slot.slot} is {slot.state}" + (f" ({slot.detail})" if slot.detail else "")


def _failed_at(now: float, queue: Queue) -> list[LoadFailure]:
    # A first try is noted before it is made; until its time is over it is no failure yet.
    return [each for each in list_failures(queue) if each.count > 1 or each.retry_at <= now]


def _seen_at(now: float, slots: Iterable[SlotStatus]) -> list[SlotStatus]:
    return [_as_seen(slot, now - slot.updated_at) for slot in slots]


def _as_seen(slot: SlotStatus, silent_s: float) -> SlotStatus:
    if slot.state != SlotState.READY or silent_s <= SILENT_AFTER_S:
        return slot
    return replace(slot, state=SlotState.FAILED, detail=f"has not reported for {silent_s:.0f} s")
