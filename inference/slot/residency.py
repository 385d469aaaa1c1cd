"""A loaded version in its role: how much memory it is given, and whether it makes room for another."""

from __future__ import annotations

import time

from inference.engine.loop import EngineLoop
from inference.engine.memory import offer_to_oom_killer
from inference.protocol import Resident
from inference.queue import Adoption
from inference.replicas import Member
from inference.slot.loading import SlotEngine

CANDIDATE_IDLE_S = 60.0  # a candidate that is asked more often than that keeps its memory
STANDBY_OOM_SCORE = (
    300  # out of memory, the kernel takes a version that nobody asks before one that answers
)
SHORT_OF_MEMORY = "There is no memory for the whole KV cache, so long prompts wait; lower kv_cache_bytes, or let other versions go."


class Residency:
    """What a slot serves.

    The role says what the version is worth; use goes before it. A live version has its whole KV cache. A previous or
    retired one gives back what the requests from before do not hold. A candidate keeps its cache while a canary, a
    shadow or anybody asks it. Whatever the role, an engine that is given a request grows by itself, at once, and is
    not shrunk under it: the route may have changed a moment before the role.
    """

    def __init__(
        self,
        resident: Resident,
        engine: SlotEngine,
        loop: EngineLoop,
        member: Member,
        *,
        oom_score: int,
    ) -> None:
        self.resident = resident
        self.loop = loop
        self.engine = engine
        self._member = member
        self._oom_score = oom_score
        self._used_at = -CANDIDATE_IDLE_S
        self._role_since = time.monotonic()
        self._needed_since: float | None = None
        self._queue_age_s = 0.0

    def follow(self, adoption: Adoption, *, yield_s: float) -> bool:
        """Take on the role that is desired now; False if this version is to be let go."""
        if adoption.resident is None:
            return False
        now = time.monotonic()
        if adoption.resident.role != self.resident.role:
            self._role_since = now
        self.resident = adoption.resident
        if self.loop.tickets() or self.loop.copies.held():
            self._used_at = now
        self.loop.call_soon(self.fit)
        if not adoption.is_needed_elsewhere:
            self._needed_since = None
            return True
        self._needed_since = self._needed_since or now
        return now - self._needed_since < yield_s

    def fit(self) -> None:
        """Give the version the memory of its role; in the engine thread, between steps."""
        is_live = self.resident.role == "live"
        has_its_size = self.engine.resize_kv(is_standby=self._is_standby())
        detail = "" if has_its_size or not is_live else SHORT_OF_MEMORY
        if detail != self._member.status.detail:
            self._member.note(detail=detail)
        offer_to_oom_killer(0 if is_live else STANDBY_OOM_SCORE, base=self._oom_score)

    def note_usage(self) -> None:
        """Have the next renewal report the KV cache, and how the engine did."""
        usage = self.engine.usage()
        self._queue_age_s = self._read_queue_age()
        self._member.note(
            kv_blocks=usage.kv_blocks,
            kv_blocks_used=usage.kv_blocks_used,
            kv_blocks_full=usage.kv_blocks_full,
            telemetry={name: _round(value) for name, value in self.telemetry().items()},
        )

    def telemetry(self) -> dict[str, float | None]:
        """The last seconds of the engine, its cache now, and the age of the queue at the last renewal; from any thread."""
        usage = self.engine.usage()
        free = usage.kv_blocks - usage.kv_blocks_used - usage.kv_blocks_cached
        return self.engine.telemetry.report() | {
            "kv_used": usage.kv_blocks_used,
            "kv_cached": usage.kv_blocks_cached,
            "kv_free": free,
            "num_preemptions": usage.num_preemptions,
            "queue_age_s": self._queue_age_s,
        }

    def _read_queue_age(self) -> float:
        """How long the request has waited that came first of those that no step has been planned for, here or in the lane."""
        waiting = [each.arrived_at for each in self.loop.tickets() if not each.is_running]
        oldest = self._member.oldest_waiting_at()
        came_at = min(waiting if oldest is None else [*waiting, oldest], default=None)
        return 0.0 if came_at is None else max(0.0, time.monotonic() - came_at)

    def _is_standby(self) -> bool:
        if self.resident.role == "candidate":
            return time.monotonic() - self._used_at >= CANDIDATE_IDLE_S
        is_asked = any(each.arrived_at > self._role_since for each in self.loop.tickets())
        return self.resident.role != "live" and not is_asked


def _round(value: float | None) -> float | None:
    """A report goes out twice a second; nobody reads more than four digits."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
