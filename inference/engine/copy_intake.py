"""What feeds a slot's copies: one thread that takes them while no request waits, and writes what came of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from inference.engine.contract import Engine
from inference.engine.copies import CRASHED_ENGINE, MAX_ATTEMPTS, Copy, CopyDesk, start_by
from inference.engine.loop import EngineLoop
from inference.engine.request import RequestRefused, fill_sampling
from inference.protocol import GenerateRequest
from inference.queue import Lane, OutageLog, Queue, QueueUnavailable, TakenCopy
from inference.replicas import Member

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
RETRY_S = 0.5

INTERNAL_ERROR = "internal_error"
GONE = "gone"


class CopyIntake:
    """Feeds one loop's copies from the low lane of its version until told to stop."""

    def __init__(
        self, loop: EngineLoop, engine: Engine, queue: Queue, lane: Lane, member: Member
    ) -> None:
        self._loop = loop
        self._desk: CopyDesk = loop.copies
        self._engine = engine
        self._queue = queue
        self._lane = lane
        self._member = member
        self._outages = OutageLog(logger)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, guard: Callable[[Callable[[], None]], None]) -> None:
        """Start the thread; ``guard`` runs its body and acts when that raises."""
        self._thread = threading.Thread(
            target=guard, args=(self._repeat,), name="copies", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread, drop what came since the loop ended, and write what is left; in the engine thread, bounded."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._desk.close()
        try:
            self._write()
        except (
            QueueUnavailable
        ) as error:  # whoever compares waits for them in vain, and knows when to stop
            logger.warning("copies could not be ended lane=%s error=%s", self._lane, error)

    def look(self) -> None:
        """Write what came of copies, and take new ones."""
        self._write()
        consumer = self._member.consumer
        tickets = self._loop.tickets()
        held = self._desk.held()
        taken, lost = self._queue.take_copies(
            self._lane,
            consumer,
            0 if self._has_waiting() else self._desk.count_room(len(tickets)),
            held=held,
            is_idle=not tickets and not held,
        )
        if lost:
            self._desk.lose(lost)
        if consumer == self._member.consumer:
            for each in taken:
                self._take(each)
        if taken or lost:
            self._loop.call_soon(lambda: None)  # it has something to look at

    def _has_waiting(self) -> bool:
        return any(not each.is_running for each in self._loop.tickets())

    def _write(self) -> None:
        if finished := self._desk.finished():
            self._queue.answer_copies(self._lane, self._member.consumer, finished)
            self._desk.written(finished)

    def _take(self, taken: TakenCopy) -> None:
        delivery = taken.delivery
        if taken.body is None:
            self._desk.finish(delivery, "dropped", dropped=GONE)
        elif delivery.attempt > MAX_ATTEMPTS:
            logger.error("copy killed its slots copy=%s lane=%s", delivery.entry.id, self._lane)
            self._desk.finish(delivery, CRASHED_ENGINE)
        else:
            self._prepare(taken, taken.body)

    def _prepare(self, taken: TakenCopy, body: str) -> None:
        entry = taken.delivery.entry
        try:
            start = self._encode(entry.id, GenerateRequest.from_json(body))
        except RequestRefused as refusal:
            self._desk.finish(taken.delivery, refusal.failure.code)
        except Exception:  # one broken copy must not end the others
            logger.exception("copy cannot be prepared copy=%s", entry.id)
            self._desk.finish(taken.delivery, INTERNAL_ERROR)
        else:
            arrived_at = self._member.clock.to_monotonic(entry.arrival_ms)
            run_s = (entry.deadline_ms - entry.arrival_ms) / 1000
            self._desk.take(Copy(taken.delivery, start_by(arrived_at), run_s, start))

    def _encode(self, name: str, request: GenerateRequest) -> Callable[[], None]:
        """The call that adds the copy to the engine."""
        prompt = self._engine.encode(request)
        sampling = fill_sampling(request, self._engine.generation_defaults)
        add = partial(
            self._engine.add_request, name, prompt, sampling, cache_salt=request.cache_salt
        )
        if request.score_text is None:
            return add
        return partial(add, scored_token_ids=self._engine.encode_answer(request.score_text))

    def _repeat(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                self._stop.wait(LOOK_EVERY_S)
            except QueueUnavailable as error:
                self._outages.warn("copies", self._member.slot, error)
                self._stop.wait(RETRY_S)
