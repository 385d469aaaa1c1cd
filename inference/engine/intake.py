"""What comes in to an engine loop: entries of its lane and of slots that died, notices, gateways that vanish.

Two threads that wait on sockets: one pulls and encodes, one watches. Both outlive any outage of Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from inference.engine.contract import Engine
from inference.engine.loop import EngineLoop
from inference.engine.request import RequestRefused, fill_sampling
from inference.engine.ticket import MAX_ATTEMPTS, Ticket, Work
from inference.protocol import Failure, GenerateRequest
from inference.queue import Delivery, Lane, Notice, OutageLog, Queue, QueueUnavailable
from inference.replicas import Member

logger = logging.getLogger(__name__)

PULL_COUNT = 32
PULL_BLOCK_MS = 500
WATCH_BLOCK_MS = 250
CLAIM_EVERY_S = 0.5
RESCUE_EVERY_S = 0.25  # with WATCH_BLOCK_MS: at least every half second
GATEWAYS_EVERY_S = 1.0
GATEWAY_GRACE_S = 3.0  # after an outage of Redis, gateways need a moment to renew
RETRY_S = 0.2

CRASHED_ENGINE = Failure(
    "request_crashed_engine",
    f"The engine crashed {MAX_ATTEMPTS} times while it ran this request; it will not be tried again.",
    500,
)
GATEWAY_LOST = Failure(
    "gateway_lost",
    "The gateway that asked was silent for too long, so its request was given up; try again.",
    503,
    retry_after_s=1,
)
VERSION_ROLLED_BACK = Failure(
    "version_rolled_back",
    "The version that was answering was taken back before the answer was complete; try again.",
    503,
    retry_after_s=1,
)
INTERNAL_ERROR = Failure("internal_error", "The request could not be prepared for the engine.", 500)


class Intake:
    """Feeds one loop from one lane until told to stop."""

    def __init__(
        self, loop: EngineLoop, engine: Engine, queue: Queue, lane: Lane, member: Member
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._queue = queue
        self._lane = lane
        self._member = member
        self._outages = OutageLog(logger)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._reply_lost = False
        self._claim_at = 0.0
        self._last_notice = "0"
        self._lost_route: Notice | None = None
        self._rescue_at = 0.0
        self._check_gateways_at = 0.0
        self._absent_since: dict[str, float] = {}

    def start(self, guard: Callable[[Callable[[], None]], None]) -> None:
        """Start both threads; ``guard`` runs their bodies and acts when one raises."""
        for name, once in (("intake", self._pull), ("watch", self._watch)):
            body = partial(self._repeat, once)
            self._threads.append(
                threading.Thread(target=guard, args=(body,), name=name, daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop both threads; what they were given meanwhile is given back."""
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ pull and encode

    def _pull(self) -> None:
        try:
            self._pull_once()
        except QueueUnavailable:
            self._reply_lost = True  # and with it, perhaps, entries that are ours now
            raise

    def _pull_once(self) -> None:
        consumer = self._member.consumer
        if self._reply_lost:
            known = {ticket.delivery.entry_id for ticket in self._loop.tickets()}
            self._accept(self._queue.find_unheard(self._lane, consumer, known), consumer)
            self._reply_lost = False
        if time.monotonic() >= self._claim_at and (room := self._loop.claim_room()):
            claimed = self._queue.claim(self._lane, consumer, room, MAX_ATTEMPTS)
            if len(claimed) < room:  # else there may be more
                self._claim_at = time.monotonic() + CLAIM_EVERY_S
            self._accept(claimed, consumer)
        if room := self._loop.wait_for_room(CLAIM_EVERY_S):
            count = min(room, PULL_COUNT)
            self._accept(self._queue.pull(self._lane, consumer, count, PULL_BLOCK_MS), consumer)

    def _accept(self, deliveries: Sequence[Delivery], consumer: str) -> None:
        if suspects := [each for each in deliveries if each.is_suspect_to_set_aside]:
            self._queue.set_aside(self._lane, consumer, suspects)
            self._claim_at = 0.0
        deliveries = [each for each in deliveries if not each.is_suspect_to_set_aside]
        if not deliveries:
            return
        tickets = self._loop.take(deliveries, consumer)
        if tickets is None:
            self._queue.give_back(self._lane, consumer, deliveries)
            return
        try:
            bodies = self._queue.read_bodies([ticket.id for ticket in tickets])
        except QueueUnavailable:
            self._loop.untake(tickets)
            raise
        for ticket, body in zip(tickets, bodies, strict=True):
            self._prepare(ticket, body)

    def _prepare(self, ticket: Ticket, body: str | None) -> None:
        if body is None:  # cancelled, or nobody waits for it any more
            self._loop.abort(ticket.id)
        elif ticket.attempt > MAX_ATTEMPTS:
            logger.error("request is a dead letter request=%s lane=%s", ticket.id, self._lane)
            self._loop.abort(ticket.id, CRASHED_ENGINE)
        elif ticket.deadline_at > time.monotonic():  # else the loop ends it
            self._encode(ticket, body)

    def _encode(self, ticket: Ticket, body: str) -> None:
        try:
            work = self._work_of(GenerateRequest.from_json(body))
        except RequestRefused as refusal:
            self._loop.abort(ticket.id, refusal.failure)
        except Exception:  # one broken request must not end the others'
            logger.exception("request cannot be prepared request=%s", ticket.id)
            self._loop.abort(ticket.id, INTERNAL_ERROR)
        else:
            self._loop.hand_over(ticket, work)

    def _work_of(self, request: GenerateRequest) -> Work:
        answer = request.score_text
        return Work(
            self._engine.encode(request),
            fill_sampling(request, self._engine.generation_defaults),
            n=request.n if answer is None else 1,
            cache_salt=request.cache_salt,
            scored_token_ids=None if answer is None else self._engine.encode_answer(answer),
        )

    # --------------------------------------------------------------------- notices, rescues and gateways

    def _watch(self) -> None:
        self._last_notice, notices = self._queue.read_notices(
            self._lane, self._last_notice, WATCH_BLOCK_MS
        )
        for notice in notices:
            self._heed(notice)
        self._withdraw()
        if time.monotonic() >= self._rescue_at:
            self._rescue_at = time.monotonic() + RESCUE_EVERY_S
            self._rescue()
        if time.monotonic() >= self._check_gateways_at:
            self._check_gateways_at = time.monotonic() + GATEWAYS_EVERY_S
            self._check_gateways()

    def _heed(self, notice: Notice) -> None:
        if notice.cancelled:
            logger.debug("request cancelled request=%s", notice.cancelled)
            self._loop.abort(notice.cancelled)
        else:
            self._lost_route = notice

    def _withdraw(self) -> None:
        """Again and again, because what was on its way here when the route changed is told of nowhere else.

        What came to the lane later came by a route that names it again.
        """
        if (notice := self._lost_route) is None:
            return
        failure = VERSION_ROLLED_BACK if notice.in_flight == "cut" else None
        for ticket in self._loop.tickets():
            if ticket.delivery.placed_ms <= notice.at_ms and not ticket.is_over:
                self._loop.withdraw(ticket, failure)

    def _rescue(self) -> None:
        num_moved = self._queue.rescue(self._lane, self._member.slot, self._engine.fingerprint)
        if num_moved:
            logger.warning(
                "requests rescued from slots without a lease lane=%s num=%d", self._lane, num_moved
            )

    def _check_gateways(self) -> None:
        tickets = self._loop.tickets()
        gateways = {ticket.delivery.entry.gateway for ticket in tickets} - {""}
        absent = self._queue.find_absent(sorted(gateways))
        now = time.monotonic()
        self._absent_since = {each: self._absent_since.get(each, now) for each in absent}
        gone = {
            each for each, since in self._absent_since.items() if now - since >= GATEWAY_GRACE_S
        }
        for ticket in tickets:
            if ticket.delivery.entry.gateway in gone:
                self._loop.abort(ticket.id, GATEWAY_LOST)

    def _repeat(self, once: Callable[[], None]) -> None:
        """Do it again and again until stopped; while Redis is away, a little later."""
        while not self._stop.is_set():
            try:
                once()
            except QueueUnavailable as error:
                self._outages.warn("intake", self._member.slot, error)
                self._stop.wait(RETRY_S)
