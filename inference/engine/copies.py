"""Copies of requests in a slot's hands: they run in what room requests leave, and make way for them.

A copy may lengthen a request's way by one step at most. All copies are taken out of the engine before the next step
as soon as a request got no token in the last one, or might lack a block in the next; they start again from the beginning
when there is room. A copy that was lost with a slot runs alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from inference.engine.memory import Usage
from inference.engine.request import RequestRefused, StepOutput
from inference.engine.ticket import Ticket
from inference.protocol import COPY_WAIT_S, Answer
from inference.queue import Delivery, FinishedCopy, Lane

SHARE = 4  # copies may be one in so many of what runs at once
MAX_ATTEMPTS = 2  # a copy whose slots died is not given to a third
MAX_YIELDS = 3  # a copy that made way more often is dropped
PAUSE_S = 0.2  # after copies made way
FREE_SHARE = 0.5  # of the KV cache, or no copy starts

DEADLINE_EXCEEDED = "deadline_exceeded"
CRASHED_ENGINE = "request_crashed_engine"
LATE, PREEMPTED, SHUTDOWN = "late", "preempted", "shutdown"


class CopyEngine(Protocol):
    """What copies need of an engine."""

    @property
    def fingerprint(self) -> str:
        """Names the numerics."""

    def room(self) -> int:
        """How many more requests it would take now."""

    def usage(self) -> Usage:
        """What it holds now."""

    def abort(self, request_id: str) -> bool:
        """Forget a request."""


@dataclass(slots=True, eq=False)
class Copy:
    """A copy that was delivered here, until its half of the pair is written.

    ``start`` adds it to the engine. ``start_by`` and ``deadline_at`` are on ``time.monotonic()``.
    """

    delivery: Delivery
    start_by: float
    run_s: float
    start: Callable[[], None]
    started_at: float = 0.0
    deadline_at: float = 0.0
    num_yields: int = 0
    texts: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The copy's id."""
        return self.delivery.entry.id

    @property
    def is_suspect(self) -> bool:
        """Whether a slot died while it had the copy."""
        return self.delivery.attempt > 1


class CopyDesk:
    """All copies of one slot, from their delivery until their halves are written."""

    def __init__(self, engine: CopyEngine, lane: Lane, now_s: Callable[[float], float]) -> None:
        """``now_s`` turns a moment of ``time.monotonic()`` into epoch seconds."""
        self._engine = engine
        self._lane = lane
        self._epoch = now_s
        self._lock = threading.Lock()  # guards the next four
        self._waiting: dict[str, Copy] = {}
        self._running: dict[str, Copy] = {}
        self._lost: set[str] = set()
        self._finished: list[FinishedCopy] = []

        self._seen: dict[str, int] = {}
        self._paused_until = 0.0
        self._is_closed = False

    # --------------------------------------------------------------------------------------------- any thread

    def count_places(self) -> int:
        """How many more requests the engine would take: copies make way for them."""
        return self._engine.room() + len(self._running)

    def count_room(self, num_requests: int) -> int:
        """How many more copies may be taken beside so many requests."""
        with self._lock:
            num_held = len(self._waiting) + len(self._running)
            places = self.count_places() + num_requests
            return 0 if self._is_closed else max(0, max(1, places // SHARE) - num_held)

    def held(self) -> list[str]:
        """The entries in our hands."""
        with self._lock:
            copies = [*self._waiting.values(), *self._running.values()]
            ended = [each.delivery.entry_id for each in self._finished]
        return [each.delivery.entry_id for each in copies] + ended

    def take(self, copy: Copy) -> None:
        """Run it when there is room."""
        with self._lock:
            self._waiting[copy.id] = copy

    def lose(self, entry_ids: set[str]) -> None:
        """They are not ours any more: forget them without a word, before the next step."""
        with self._lock:
            self._lost |= entry_ids

    def finish(self, delivery: Delivery, outcome: str, *, dropped: str = "") -> None:
        """End a copy that was not run."""
        answer = self._answer(delivery, outcome, total_s=0.0)
        with self._lock:
            self._finished.append(FinishedCopy(delivery, replace(answer, dropped=dropped)))

    def finished(self) -> list[FinishedCopy]:
        """Those whose halves are to be written; ``written`` takes them off."""
        with self._lock:
            return list(self._finished)

    def written(self, finished: Sequence[FinishedCopy]) -> None:
        """Their halves stand in Redis, or are not ours to write."""
        with self._lock:
            ours = {id(each) for each in finished}
            self._finished = [each for each in self._finished if id(each) not in ours]

    # ------------------------------------------------------------------------------------------ engine thread

    def make_way(self, tickets: Sequence[Ticket]) -> None:
        """Before a step: end what is over, and take all copies out of the engine if requests need what they have."""
        self._forget_lost()
        self._end_expired()
        if self._running and (self._are_in_the_way(tickets) or self._is_short_of_blocks()):
            self._yield_all()

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Before a step: start what fits beside the requests that run; nothing while one of them has no token yet."""
        self._seen = {each.id: each.num_rows for each in tickets if each.is_running}
        if not self._waiting or time.monotonic() < self._paused_until or self._is_closed:
            return
        if not all(each.is_running and each.has_rows and each.attempt == 1 for each in tickets):
            return
        for copy in list(self._waiting.values()):
            if self._may_start(copy, len(tickets)):
                self._start(copy)

    def take_output(self, output: StepOutput) -> None:
        """What a step added to a copy; what belongs to none is nothing."""
        copy = self._running.get(output.request_id)
        if copy is None:
            return
        copy.texts.append(output.text)
        if output.failure is not None:
            self._end(copy, output.failure.code)
        elif output.finish_reason is not None:
            self._end(copy, "ok", output)

    def close(self) -> None:
        """The slot leaves: nothing starts any more, and what is here is dropped. It may be called twice."""
        self._is_closed = True
        for copy in [*self._running.values(), *self._waiting.values()]:
            self._drop(copy, SHUTDOWN)

    def _are_in_the_way(self, tickets: Sequence[Ticket]) -> bool:
        """Whether a request got no token in the last step, be it that it has no place, or must not share the engine."""
        if any(each.is_suspect for each in self._running.values()):
            return bool(tickets)
        has_stalled = any(self._seen.get(each.id) == each.num_rows for each in tickets)
        return has_stalled or any(each.attempt > 1 for each in tickets)

    def _is_short_of_blocks(self) -> bool:
        """Whether the next step could lack a block for one of all that run."""
        usage = self._engine.usage()
        num_free = usage.kv_blocks - usage.kv_blocks_used
        return bool(self._seen) and num_free < len(self._seen) + len(self._running)

    def _may_start(self, copy: Copy, num_requests: int) -> bool:
        if copy.is_suspect:
            return not num_requests and not self._running
        if any(each.is_suspect for each in self._running.values()):
            return False
        usage = self._engine.usage()
        has_blocks = usage.kv_blocks_used <= FREE_SHARE * usage.kv_blocks_full
        places = self.count_places() + num_requests
        is_within_share = len(self._running) < max(1, places // SHARE)
        return self._engine.room() > 0 and has_blocks and is_within_share

    def _start(self, copy: Copy) -> None:
        with self._lock:
            del self._waiting[copy.id]
            self._running[copy.id] = copy
        copy.started_at = time.monotonic()
        copy.deadline_at = copy.started_at + copy.run_s
        try:
            copy.start()
        except RequestRefused as refusal:
            self._end(copy, refusal.failure.code)

    def _yield_all(self) -> None:
        self._paused_until = time.monotonic() + PAUSE_S
        for copy in list(self._running.values()):
            self._engine.abort(copy.id)
            copy.texts.clear()
            copy.num_yields += 1
            if copy.num_yields > MAX_YIELDS:
                self._drop(copy, PREEMPTED)
                continue
            with self._lock:
                del self._running[copy.id]
                self._waiting[copy.id] = copy

    def _end_expired(self) -> None:
        now = time.monotonic()
        for copy in [each for each in self._running.values() if each.deadline_at <= now]:
            self._end(copy, DEADLINE_EXCEEDED)
        for copy in [each for each in self._waiting.values() if each.start_by <= now]:
            if copy.is_suspect:
                self._end(copy, CRASHED_ENGINE)
            else:
                self._drop(copy, PREEMPTED if copy.num_yields else LATE)

    def _forget_lost(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, set()
            for held in (self._running, self._waiting):
                for copy in [each for each in held.values() if each.delivery.entry_id in lost]:
                    self._engine.abort(copy.id)
                    del held[copy.id]

    def _drop(self, copy: Copy, reason: str) -> None:
        self._end(copy, "dropped", dropped=reason)

    def _end(
        self, copy: Copy, outcome: str, output: StepOutput | None = None, *, dropped: str = ""
    ) -> None:
        if copy.id in self._running:
            self._engine.abort(copy.id)
        took_s = time.monotonic() - copy.started_at if copy.started_at else 0.0
        answer = self._answer(copy.delivery, outcome, total_s=took_s)
        answer = replace(answer, text="".join(copy.texts), dropped=dropped)
        if output is not None:
            answer = _with_facts(answer, output)
        with self._lock:
            self._waiting.pop(copy.id, None)
            self._running.pop(copy.id, None)
            self._finished.append(FinishedCopy(copy.delivery, answer))

    def _answer(self, delivery: Delivery, outcome: str, *, total_s: float) -> Answer:
        entry = delivery.entry
        return Answer(
            copy_of=entry.id.removesuffix(f"~{entry.arm}"),
            arm=entry.arm,
            endpoint=self._lane.endpoint,
            version=self._lane.version,
            generation=entry.generation,
            rollout=entry.rollout,
            fingerprint=self._engine.fingerprint,
            outcome=outcome,
            at=self._epoch(time.monotonic()),
            total_s=total_s,
        )


def start_by(arrived_at: float) -> float:
    """By when a copy that came at ``arrived_at`` must have been started."""
    return arrived_at + COPY_WAIT_S


def _with_facts(answer: Answer, output: StepOutput) -> Answer:
    return replace(
        answer,
        finish_reason=str(output.finish_reason or ""),
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_output_tokens,
        engine_s=output.engine_s,
        score=output.score,
    )
