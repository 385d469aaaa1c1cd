"""What the gateway calls: queue a request, read its rows, cancel it, log it.

One ``Client`` per process and event loop. Every stream ends with a row that carries ``failure``, or with the last of the
rows that carry ``finish``, one for each choice, whatever dies on the way: a slot (another one goes on, or the stream fails visibly), Redis (the reader reconnects and reads on
from the last frame), or nobody at all (the deadline, on this process's own clock).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from inference.protocol import (
    Answer,
    Failure,
    FeedbackRecord,
    GenerateRequest,
    RequestRecord,
    StepFrame,
    TokenRow,
)
from inference.queue import (
    AsyncQueue,
    NoReadySlot,
    OutageLog,
    Placement,
    QueueFull,
    QueueUnavailable,
    UnknownEndpoint,
)

__all__ = [
    "Client",
    "NoReadySlot",
    "Placement",
    "QueueFull",
    "QueueUnavailable",
    "Stream",
    "UnknownEndpoint",
]

logger = logging.getLogger(__name__)

MAX_BUFFERED_ROWS = 4_096
MAX_BUFFERED_RECORDS = 10_000
MAX_BUFFERED_ANSWERS = 500
RECORDS_PER_CALL = 500
ANSWERS_PER_CALL = 50
DEADLINE_MARGIN_S = 1.0  # the slot ends it first, and knows better why
CANCEL_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
READ_BLOCK_MS = 1_000
RENEW_EVERY_S = 1.0
FLUSH_EVERY_S = 0.2
RETRY_S = 0.1
SILENT_S = 3.0  # longer than rows that are written already need to get here
LOOK_FOR_LOST_EVERY_S = 2.0

DEADLINE_EXCEEDED = Failure(
    "deadline_exceeded",
    "No complete answer came before the deadline; ask for fewer tokens, or try again when there is less load.",
    504,
)
STREAM_GAP = Failure("stream_gap", "A part of the answer was lost on the way; try again.", 502)
SLOT_LOST = Failure(
    "slot_lost",
    "The engine was lost, and the one that took over computes differently, so the answer cannot be continued; try again.",
    503,
    retry_after_s=1,
)
REQUEST_LOST = Failure(
    "request_lost",
    "The queue was restarted without its data or emptied, and the request went with it; try again.",
    503,
    retry_after_s=1,
)
READER_TOO_SLOW = Failure(
    "reader_too_slow", "The answer was not read as fast as it was written; read faster.", 503
)


class Stream:
    """The rows of one request: those of each choice in order and each once.

    ``placement.version`` follows who computes them, also when a change of route moved the request; generation and arm
    stay as it was queued.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.id
        self.is_over_at_slot = False
        self._placement = Placement("", 0, "", "", request.deadline_s)
        self._deadline_at = time.monotonic() + request.deadline_s + DEADLINE_MARGIN_S
        self._rows: list[TokenRow] = []
        self._has_rows = asyncio.Event()
        self._next_seqs = [0] * request.n  # by choice
        self._num_open = request.n  # choices without a finish
        self._attempt = 0
        self._fingerprint = ""
        self._served_by = ""
        self._is_over = False
        self._is_read = False
        self._heard_at = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether it is queued or running, as far as we know, and has not been heard of for a while."""
        is_open = bool(self._placement.entry_id) and not self._is_over
        return is_open and time.monotonic() - self._heard_at > SILENT_S

    @property
    def fingerprint(self) -> str:
        """Which numerics computed the rows so far."""
        return self._fingerprint

    @property
    def placement(self) -> Placement:
        """Where the request was queued, and by which version it is answered."""
        return replace(self._placement, version=self._served_by or self._placement.version)

    def place(self, placement: Placement) -> None:
        """The request is queued; the route may allow it less time than it asked for."""
        self._placement = placement
        self._deadline_at = time.monotonic() + placement.deadline_s + DEADLINE_MARGIN_S
        self._heard_at = time.monotonic()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenRow]:
        """At least one row; all that came since the last call."""
        if self._is_read:
            raise StopAsyncIteration
        if not self._rows:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadline_at - time.monotonic()):
                    await self._has_rows.wait()
        if time.monotonic() >= self._deadline_at:
            self._fail(DEADLINE_EXCEEDED)
        rows, self._rows = self._rows, []
        self._has_rows.clear()
        self._is_read = self._is_over
        return rows

    def take(self, frame: StepFrame, row: TokenRow) -> None:
        """Accept a row, drop it, or end the stream: never out of order, never twice, never from two numerics."""
        if self._is_over or row.attempt < self._attempt:
            return
        self._attempt = row.attempt  # row -1 of an attempt says this and no more
        if row.failure is not None:
            # It ends the request wherever its attempt stands: a rerun may fail before it has caught up.
            self.is_over_at_slot = True
            self._fail(row.failure)
        elif any(self._next_seqs) and frame.fingerprint != self._fingerprint:
            self._fail(SLOT_LOST)
        elif row.choice >= len(self._next_seqs) or row.seq > self._next_seqs[row.choice]:
            self._fail(STREAM_GAP)
        elif row.seq == self._next_seqs[row.choice]:
            self._fingerprint = frame.fingerprint
            self._served_by = frame.version
            self._num_open -= row.finish is not None
            self.is_over_at_slot = self._num_open == 0
            self._append(row)
            if len(self._rows) >= MAX_BUFFERED_ROWS:
                self._fail(READER_TOO_SLOW)

    def lose(self) -> None:
        """Nobody has the request any more."""
        self._fail(REQUEST_LOST)

    def _fail(self, failure: Failure) -> None:
        if not self._is_over:
            seq = self._next_seqs[0]
            self._append(TokenRow(self.request_id, self._attempt, seq, "", failure=failure))

    def _append(self, row: TokenRow) -> None:
        self._rows.append(row)
        self._next_seqs[row.choice] += 1
        self._heard_at = time.monotonic()
        self._is_over = row.failure is not None or self._num_open == 0
        self._has_rows.set()


class Client:
    """The gateway's link to the engines; ``start`` it inside the event loop, ``close`` it there."""

    def __init__(self, redis_url: str, gateway_id: str | None = None) -> None:
        """``gateway_id`` must never be used twice; None makes one."""
        self.gateway_id = gateway_id or secrets.token_hex(8)
        self.num_dropped_records = 0
        self.num_dropped_answers = 0
        self._queue = AsyncQueue(redis_url)
        self._is_connected = False
        self._streams: dict[str, Stream] = {}
        self._records: deque[RequestRecord | FeedbackRecord] = deque()
        self._answers: deque[Answer] = deque()
        self._last_frame = "0"
        self._gone: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancels: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """Whether Redis answered the last time it was asked."""
        return self._is_connected

    async def start(self) -> None:
        """Start reading, renewing and logging; Redis need not be there yet."""
        for name, once, pause_s in (
            ("frames", self._read_frames, 0.0),
            ("lease", self._renew, RENEW_EVERY_S),
            ("log", self._flush_records, FLUSH_EVERY_S),
            ("answers", self._flush_answers, FLUSH_EVERY_S),
            ("lost", self._end_lost, LOOK_FOR_LOST_EVERY_S),
        ):
            task = asyncio.create_task(self._repeat(name, once, pause_s), name=name)
            self._tasks.add(task)

    async def close(self) -> None:
        """Finish cancels, write what is left of the log, end the lease, disconnect; bounded."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError, QueueUnavailable):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*self._cancels)
                await self._flush_records()
                await self._flush_answers()
                await self._queue.release_gateway(self.gateway_id)
        await self._queue.close()

    async def endpoints(self) -> list[str]:
        """Names of all endpoints. Raises ``QueueUnavailable``."""
        return await self._queue.endpoints()

    async def ready_endpoints(self) -> list[str]:
        """Names of the endpoints that could answer now. Raises ``QueueUnavailable``."""
        return await self._queue.ready_endpoints()

    async def read_key(self, key_id: str) -> str | None:
        """What the control plane published for an API key, or None. Raises ``QueueUnavailable``."""
        return await self._queue.read_key(key_id)

    @asynccontextmanager
    async def stream(self, request: GenerateRequest, sticky_key: str) -> AsyncIterator[Stream]:
        """Queue ``request`` and read its rows; leaving before the last row cancels it.

        Raises:
            UnknownEndpoint, NoReadySlot, QueueFull: nothing was queued.
            QueueUnavailable: Redis did not answer in time; a request that got there anyway is withdrawn.
        """
        stream = self._streams[request.id] = Stream(request)
        try:
            try:
                stream.place(await self._queue.enqueue(request, self.gateway_id, sticky_key))
            except (UnknownEndpoint, NoReadySlot):
                stream.is_over_at_slot = True  # it never got there
                raise
            yield stream
        finally:
            del self._streams[request.id]
            if not stream.is_over_at_slot:
                await self._cancel(request.id)

    def keep(self, answer: Answer) -> None:
        """Keep the incumbent's half of a pair in the background; when ``MAX_BUFFERED_ANSWERS`` wait, drop and count it."""
        if len(self._answers) >= MAX_BUFFERED_ANSWERS:
            self.num_dropped_answers += 1
        else:
            self._answers.append(answer)

    def record(self, record: RequestRecord | FeedbackRecord) -> None:
        """Log one request, or what its caller thought of it, in the background; when ``MAX_BUFFERED_RECORDS`` wait already, drop and count it."""
        if len(self._records) >= MAX_BUFFERED_RECORDS:
            self.num_dropped_records += 1
        else:
            self._records.append(record)

    async def _cancel(self, request_id: str) -> None:
        """Cancel to the end even while our own task is cancelled."""
        task = asyncio.create_task(self._send_cancel(request_id))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
        await asyncio.shield(task)

    async def _send_cancel(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self._queue.cancel(request_id)
        except (QueueUnavailable, TimeoutError) as error:  # its deadline ends it
            logger.warning("request not cancelled request=%s error=%s", request_id, error)

    # --------------------------------------------------------------------------------------------- background

    async def _repeat(self, name: str, once: Callable[[], Awaitable[None]], pause_s: float) -> None:
        outages = OutageLog(logger)
        while True:
            try:
                await once()
                if self._is_connected:  # who had nothing to ask has not learnt that Redis is back
                    outages.end(name, self.gateway_id)
                await asyncio.sleep(pause_s)
            except QueueUnavailable as error:
                self._is_connected = False
                outages.warn(name, self.gateway_id, error)
                await asyncio.sleep(RETRY_S)
            except Exception:  # whatever it was, the streams and records of all others go on
                logger.exception("%s failed gateway=%s", name, self.gateway_id)
                await asyncio.sleep(RETRY_S)

    async def _read_frames(self) -> None:
        self._last_frame, frames = await self._queue.read_frames(
            self.gateway_id, self._last_frame, READ_BLOCK_MS
        )
        self._is_connected = True
        for frame in frames:
            for row in frame.rows:
                if stream := self._streams.get(row.request_id):
                    stream.take(frame, row)

    async def _renew(self) -> None:
        await self._queue.renew_gateway(self.gateway_id)
        self._is_connected = True

    async def _end_lost(self) -> None:
        """End streams that would wait for their deadline in vain: silent, and without a body at two looks in a row.

        A body goes when its request has ended, and by then the last row is readable. So this happens only when Redis
        has lost body, entry or rows.
        """
        silent = [request_id for request_id, each in self._streams.items() if each.is_silent]
        gone = await self._queue.find_bodiless(silent)
        for request_id in gone & self._gone:
            if stream := self._streams.get(request_id):
                logger.warning("request lost request=%s", request_id)
                stream.lose()
        self._gone = gone

    async def _flush_records(self) -> None:
        """Write the buffered records; after an outage some may be written twice, under the same id."""
        while self._records:
            batch = [
                record for record, _ in zip(self._records, range(RECORDS_PER_CALL), strict=False)
            ]
            texts = [text for record in batch if (text := self._write_record(record))]
            await self._queue.append_log(texts)
            for _ in batch:
                self._records.popleft()

    def _write_record(self, record: RequestRecord | FeedbackRecord) -> bytes | None:
        try:
            return record.to_json().encode()
        except ValueError:  # a number that is none, or half a surrogate pair
            name = record.id if isinstance(record, RequestRecord) else record.request_id
            logger.exception("record dropped request=%s", name)
            self.num_dropped_records += 1
            return None

    async def _flush_answers(self) -> None:
        """Write the buffered halves; one that is written twice is compared once."""
        while self._answers:
            batch = list(itertools.islice(self._answers, ANSWERS_PER_CALL))
            texts = [text for answer in batch if (text := self._write_answer(answer))]
            await self._queue.append_answers(texts)
            for _ in batch:
                self._answers.popleft()

    def _write_answer(self, answer: Answer) -> bytes | None:
        try:
            return answer.to_json().encode()
        except ValueError:
            logger.exception("answer dropped request=%s", answer.copy_of)
            self.num_dropped_answers += 1
            return None
