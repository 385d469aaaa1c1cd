"""The engine thread and the threads that feed it: pull by room, step, one frame per gateway and step.

The engine thread is the only one that touches the engine (but for ``encode``) and the only one that computes; the others
wait on sockets, so that Python's lock is free when a step needs it. Rows leave through the engine thread itself: while
Redis takes none, no step is made, and no row is ever skipped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from inference.engine.contract import Engine
from inference.engine.copies import CopyDesk
from inference.engine.request import RequestRefused, StepOutput
from inference.engine.ticket import MAX_ATTEMPTS, SUSPECTS_AT_ONCE, Ticket, Work, may_join
from inference.protocol import Failure, StepFrame, TokenRow
from inference.queue import Delivery, Lane, OutageLog, Queue, QueueUnavailable
from inference.replicas import Member

logger = logging.getLogger(__name__)

IDLE_S = 0.5
LAST_SEND_S = 3.0  # how long a slot that shuts down tries to write its last rows

DEADLINE_EXCEEDED = Failure(
    "deadline_exceeded",
    "The request did not finish before its deadline; ask for fewer tokens, or try again when there is less load.",
    504,
)
SHUTTING_DOWN = Failure(
    "server_shutting_down",
    "The engine was shut down before the answer was complete; try again.",
    503,
    retry_after_s=1,
)


class EngineLoop:
    """Runs the requests of one lane on one engine: ``run`` in the engine thread, the rest from any thread.

    Invariant: every entry this consumer owns has a ticket, and a ticket goes only when Redis has taken its end, when it
    was given back or returned, or when the lease was lost and the entry with it.

    Suspects of a crash: at most ``SUSPECTS_AT_ONCE`` are taken over at a time. One on its last attempt runs when all
    that came before it has ended, with nothing beside it and nothing waiting: so a poisonous request never takes the
    last attempt of an innocent one.
    """

    def __init__(self, engine: Engine, queue: Queue, lane: Lane, member: Member) -> None:
        self._engine = engine
        self._queue = queue
        self._lane = lane
        self._member = member
        self.copies = CopyDesk(engine, lane, member.clock.to_server)
        self._outages = OutageLog(logger)
        self._changed = threading.Condition()  # guards what follows up to the blank line
        self._tickets: dict[str, Ticket] = {}
        self._room = engine.room()
        self._drain_until: float | None = None
        self._must_rejoin = False

        self._arrived: deque[Ticket] = deque()
        self._aborts: deque[tuple[Ticket, Failure | None]] = deque()
        self._withdrawn: deque[tuple[Ticket, Failure | None]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._waiting: list[Ticket] = []
        self._rows: dict[str, list[TokenRow]] = {}
        self._ended: list[Ticket] = []
        self._returned: list[Ticket] = []
        self._give_up_at = math.inf
        self.progressed_at = time.monotonic()

    # --------------------------------------------------------------------------------------------- any thread

    def wait_for_room(self, timeout_s: float) -> int:
        """How many new entries may be pulled, as soon as it is more than none; 0 at the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._count_room() > 0, timeout_s)
            return self._count_room()

    def claim_room(self) -> int:
        """How many entries may be taken over from slots that died."""
        with self._changed:
            suspects = sum(ticket.attempt > 1 for ticket in self._tickets.values())
            return max(0, min(self._count_room(), SUSPECTS_AT_ONCE - suspects))

    def take(self, deliveries: Sequence[Delivery], consumer: str) -> list[Ticket] | None:
        """Tickets for what was delivered to ``consumer``; None while draining: give it back.

        What came under a name that is ours no more is left to whoever claims it.
        """
        with self._changed:
            if self._drain_until is not None:
                return None
            if consumer != self._member.consumer:
                return []
            tickets = [self._open_ticket(each) for each in deliveries if self._is_new(each)]
            self._tickets |= {ticket.id: ticket for ticket in tickets}
            return tickets

    def untake(self, tickets: Sequence[Ticket]) -> None:
        """Undo ``take``; the entries are found again as unheard."""
        with self._changed:
            for ticket in tickets:
                ticket.is_over = True
                self._tickets.pop(ticket.id, None)

    def hand_over(self, ticket: Ticket, work: Work) -> None:
        """A ticket's prompt is encoded: run it."""
        ticket.work = work
        self._arrived.append(ticket)
        self._wake.set()

    def abort(self, request_id: str, failure: Failure | None = None) -> None:
        """End a request in whatever state, with ``failure`` as its last row, or silently; an unknown one is fine."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._aborts.append((ticket, failure))
            self._wake.set()

    def withdraw(self, ticket: Ticket, failure: Failure | None) -> None:
        """Return a request to the live version if no token of it was sent, else end it with ``failure``, if there is one."""
        self._withdrawn.append((ticket, failure))
        self._wake.set()

    def tickets(self) -> list[Ticket]:
        """All requests that are in this slot's hands."""
        with self._changed:
            return list(self._tickets.values())

    def rejoin(self) -> None:
        """The lease was lost: before the next step drop every request, and consume under a new name."""
        with self._changed:
            self._must_rejoin = True
        self._wake.set()

    def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what runs within ``timeout_s``, then end the rest; ``run`` returns after that."""
        with self._changed:
            self._drain_until = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._wake.set()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have the engine thread call it between two steps, where it may touch the engine."""
        self._calls.append(call)
        self._wake.set()

    def _count_room(self) -> int:
        tickets = self._tickets.values()
        if self._drain_until is not None or any(each.attempt >= MAX_ATTEMPTS for each in tickets):
            return 0
        return max(0, self._room - sum(not each.is_running for each in tickets))

    def _is_new(self, delivery: Delivery) -> bool:
        """A request that was returned may come back, as another entry, before we know that it has gone."""
        known = self._tickets.get(delivery.entry.id)
        return known is None or (known.is_over and known.delivery.entry_id != delivery.entry_id)

    def _open_ticket(self, delivery: Delivery) -> Ticket:
        entry = delivery.entry
        to_monotonic = self._member.clock.to_monotonic
        return Ticket(delivery, to_monotonic(entry.arrival_ms), to_monotonic(entry.deadline_ms))

    # ------------------------------------------------------------------------------------------ engine thread

    def run(self) -> None:
        """Step until drained. An exception of the engine travels up: what it leaves behind cannot be trusted."""
        is_done = False
        while not is_done:
            self._wake.clear()
            if self._must_rejoin:
                self._forget_all()
            self._end_aborted()
            self._end_expired()
            self._end_withdrawn()
            while self._calls:
                self._calls.popleft()()
            self.copies.make_way(self.tickets())
            self._admit()
            self.copies.start(self.tickets())
            for output in self._engine.step() if self._engine.has_unfinished else ():
                self._take_output(output)
            is_done = self._is_drained()
            if is_done:
                self._end_all()
            self._flush()
            self.progressed_at = time.monotonic()
            if not is_done and not self._engine.has_unfinished:
                self._wake.wait(IDLE_S)

    def _end_aborted(self) -> None:
        while self._aborts:
            ticket, failure = self._aborts.popleft()
            self._end(ticket, failure)

    def _end_withdrawn(self) -> None:
        """All rows of earlier steps are sent by now, so a request without a row is one that nobody has seen a token of."""
        while self._withdrawn:
            ticket, failure = self._withdrawn.popleft()
            if not ticket.has_rows and not ticket.is_over:
                self._engine.abort(ticket.id)
                ticket.is_over = True
                self._returned.append(ticket)
            elif failure is not None:
                self._end(ticket, failure)

    def _end_expired(self) -> None:
        now = time.monotonic()
        for ticket in self.tickets():
            if ticket.deadline_at <= now:
                self._end(ticket, DEADLINE_EXCEEDED)

    def _admit(self) -> None:
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        if not self._waiting:
            return
        self._waiting = [ticket for ticket in self._waiting if not ticket.is_over]
        running = [ticket for ticket in self.tickets() if ticket.is_running]
        for ticket in self._waiting:
            if not may_join(running, ticket):
                break
            self._start(ticket)
            running.append(ticket)
        self._waiting = [each for each in self._waiting if not each.is_running]

    def _start(self, ticket: Ticket) -> None:
        if (work := ticket.work) is None:
            raise ValueError(f"Request {ticket.id} was handed over without its work.")
        if work.scored_token_ids is not None and not work.scored_token_ids:
            self._add_row(ticket, ticket.finish_unscored(time.monotonic()))
            self._close(ticket)
            return
        try:
            self._engine.add_request(
                ticket.id,
                work.prompt_token_ids,
                work.sampling,
                n=work.n,
                cache_salt=work.cache_salt,
                scored_token_ids=work.scored_token_ids or (),
            )
        except RequestRefused as refusal:
            self._end(ticket, refusal.failure)
            return
        with self._changed:
            ticket.is_running = True
            self._room = self.copies.count_places()

    def _take_output(self, output: StepOutput) -> None:
        ticket = self._tickets.get(output.request_id)
        if ticket is None:
            self.copies.take_output(output)
        if ticket is None or ticket.is_over:
            return
        if output.failure is not None:
            self._end(ticket, output.failure)
            return
        self._add_row(ticket, ticket.advance(output, time.monotonic()))
        if ticket.is_answered:
            self._close(ticket)

    def _end(self, ticket: Ticket, failure: Failure | None) -> None:
        """End a request that the engine did not finish; the second end of the same ticket is nothing."""
        if ticket.is_over:
            return
        self._engine.abort(ticket.id)
        if failure is not None:
            self._add_row(ticket, ticket.fail(failure))
        self._close(ticket)

    def _add_row(self, ticket: Ticket, row: TokenRow) -> None:
        if gateway := ticket.delivery.entry.gateway:
            self._rows.setdefault(gateway, []).append(row)

    def _close(self, ticket: Ticket) -> None:
        ticket.is_over = True
        self._ended.append(ticket)

    def _flush(self) -> None:
        """Write the rows and ends of this step, however long that takes."""
        gone = [*self._ended, *self._returned]
        if not self._rows and not gone:
            return
        who = (self._member.slot, self._lane.version, self._engine.fingerprint)
        frames = {gateway: StepFrame(*who, tuple(rows)) for gateway, rows in self._rows.items()}
        delay_s = 0.05
        while not self._send(frames) and time.monotonic() < self._give_up_at:
            self.progressed_at = time.monotonic()  # waiting for Redis is not a hang
            time.sleep(delay_s)
            delay_s = min(1.0, 2 * delay_s)
        self._forget(gone)

    def _send(self, frames: dict[str, StepFrame]) -> bool:
        """Whether there is nothing left to send: Redis took it, or it is not ours to send any more."""
        ended = [ticket.delivery for ticket in self._ended]
        dead = [delivery for delivery in ended if delivery.attempt > MAX_ATTEMPTS]
        returned = [ticket.delivery for ticket in self._returned]
        consumer = self._member.consumer
        try:
            is_ours = self._queue.send(
                self._lane, consumer, frames, ended=ended, dead=dead, returned=returned
            )
        except QueueUnavailable as error:
            self._outages.warn("engine step", self._member.slot, error)
            return False
        if not is_ours:
            self.rejoin()
        return True

    def _forget(self, tickets: Sequence[Ticket]) -> None:
        with self._changed:
            for ticket in tickets:
                if self._tickets.get(ticket.id) is ticket:
                    del self._tickets[ticket.id]
            self._rows.clear()
            self._ended.clear()
            self._returned.clear()
            self._room = self.copies.count_places()
            self._changed.notify_all()

    def _forget_all(self) -> None:
        """Drop everything without a word: other slots have it now."""
        with self._changed:
            tickets = list(self._tickets.values())
            logger.warning(
                "lease lost, requests dropped slot=%s num=%d", self._member.slot, len(tickets)
            )
            for ticket in tickets:
                ticket.is_over = True
                self._engine.abort(ticket.id)
            self._member.rejoin()
            self._must_rejoin = False
            self._forget(tickets)

    def _is_drained(self) -> bool:
        with self._changed:
            until = self._drain_until
            return until is not None and (not self._tickets or time.monotonic() >= until)

    def _end_all(self) -> None:
        """Tell those who have part of an answer, and leave the others' requests for another slot."""
        self._give_up_at = time.monotonic() + LAST_SEND_S
        self.copies.close()
        left = []
        for ticket in self.tickets():
            if ticket.has_rows:
                self._end(ticket, SHUTTING_DOWN)
            elif not ticket.is_over:
                ticket.is_over = True
                self._engine.abort(ticket.id)
                left.append(ticket.delivery)
        try:
            self._queue.give_back(self._lane, self._member.consumer, left)
        except QueueUnavailable as error:
            logger.warning("requests could not be given back num=%d error=%s", len(left), error)
