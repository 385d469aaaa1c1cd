"""The gateway's side: rows in order and once, every stream ends, leaving cancels."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from inference import client as client_module
from inference.client import (
    Client,
    NoReadySlot,
    QueueUnavailable,
    Stream,
    UnknownEndpoint,
)
from inference.protocol import (
    Failure,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestRecord,
    Route,
    SamplingParams,
    StepFrame,
    TokenRow,
)
from inference.queue import Lane, Lease, Queue
from tests.redis_server import RedisServer

LANE = Lane("chat", "small/1")
REQUEST = GenerateRequest("r1", "chat", SamplingParams(), 30.0, prompt="Hello")
FINISH = Finished(FinishReason.STOP, 1, 3, 0.0, 0.1, 0.2)
FAILURE = Failure("numerical_error", "The logits are not numbers.", 500)
RECORD = RequestRecord(
    "r1", "key", "chat", "small/1", 1, "live", "ok", 200, "stop", True, 1, 3, 0.0, 0.1, 0.2, 1e9
)
NOWHERE = "redis://127.0.0.1:1/0"

pytestmark = pytest.mark.asyncio


def row(seq: int, attempt: int = 1, **last: Finished | Failure) -> TokenRow:
    return TokenRow("r1", attempt, seq, f"t{seq} ", **last)  # type: ignore[arg-type]


def feed(
    stream: Stream, *rows: TokenRow, fingerprint: str = "fp", version: str = "small/1"
) -> None:
    for each in rows:
        stream.take(StepFrame("slot-1", version, fingerprint, rows), each)


async def read(stream: Stream) -> list[TokenRow]:
    return [each async for rows in stream for each in rows]


async def read_code(stream: Stream) -> str:
    """The failure that ends it."""
    last = (await read(stream))[-1]
    assert last.failure is not None
    return last.failure.code


# ------------------------------------------------------------------------------------ what a stream accepts


async def test_rows_come_in_order_and_once() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0), row(0), row(1), row(0), row(2, finish=FINISH), row(2, finish=FINISH))

    assert await read(stream) == [row(0), row(1), row(2, finish=FINISH)]
    assert stream.is_over_at_slot


async def test_a_gap_ends_the_stream_visibly() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0), row(2))

    assert await read_code(stream) == "stream_gap"
    assert not stream.is_over_at_slot


async def test_another_slot_goes_on_where_the_first_one_stopped() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0), row(1))
    feed(stream, *(row(seq, attempt=2) for seq in range(3)))
    feed(stream, row(3, attempt=2, finish=FINISH))

    assert [each.seq for each in await read(stream)] == [0, 1, 2, 3]


async def test_rows_of_an_earlier_attempt_are_dropped() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0), row(0, attempt=2))
    feed(stream, row(1, finish=FINISH), row(1, failure=FAILURE))
    feed(stream, row(1, attempt=2), row(2, attempt=2, finish=FINISH))

    assert [(each.attempt, each.seq) for each in await read(stream)] == [(1, 0), (2, 1), (2, 2)]


async def test_a_slot_that_computes_differently_does_not_continue_an_answer() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0))
    feed(stream, row(0, attempt=2), row(1, attempt=2), fingerprint="other")

    assert await read_code(stream) == "slot_lost"


async def test_a_slot_that_computes_differently_may_start_one() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0, attempt=2, finish=FINISH), fingerprint="other", version="small/2")

    assert await read(stream) == [row(0, attempt=2, finish=FINISH)]
    assert stream.placement.version == "small/2"


async def test_a_rerun_may_fail_before_it_has_caught_up() -> None:
    stream = Stream(REQUEST)
    feed(stream, row(0), row(1))
    feed(stream, row(0, attempt=4, failure=FAILURE), fingerprint="other")

    last = (await read(stream))[-1]
    assert (last.failure, last.seq, last.attempt) == (FAILURE, 2, 4)
    assert stream.is_over_at_slot


async def test_a_stream_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BUFFERED_ROWS", 10)
    stream = Stream(REQUEST)
    feed(stream, *(row(seq) for seq in range(100)))

    rows = await read(stream)
    assert len(rows) == 11
    assert rows[-1].failure is not None
    assert rows[-1].failure.code == "reader_too_slow"


async def test_without_any_row_the_deadline_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "DEADLINE_MARGIN_S", 0.0)
    started_at = time.monotonic()
    stream = Stream(replace(REQUEST, deadline_s=0.1))

    assert await read_code(stream) == "deadline_exceeded"
    assert 0.1 <= time.monotonic() - started_at < 1.0


async def test_rows_that_never_end_do_not_outlast_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "DEADLINE_MARGIN_S", 0.0)
    stream = Stream(replace(REQUEST, deadline_s=0.1))

    async def write() -> None:
        for seq in range(10_000):
            feed(stream, row(seq))
            await asyncio.sleep(0)
            if stream._is_over:
                return

    writer = asyncio.create_task(write())
    assert await read_code(stream) == "deadline_exceeded"
    await writer


# --------------------------------------------------------------------------------------- with a real server


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        queue.apply_route(Route("chat", "a", 1, live="small/1"))
        queue.publish_desired([])
        queue.renew(Lease("slot-1", "slot-1.a", 60_000), "{}", LANE, is_ready=True)
        yield queue


@pytest_asyncio.fixture
async def client(redis_url: str, queue: Queue) -> AsyncIterator[Client]:
    client = Client(redis_url)
    await client.start()
    yield client
    await client.close()


def answer(queue: Queue, client: Client, *rows: TokenRow) -> None:
    """What a slot does with the request it finds."""
    deliveries = queue.pull(LANE, "slot-1.a", 1, 500)
    frame = StepFrame("slot-1", "small/1", "fp", rows)
    queue.send(LANE, "slot-1.a", {client.gateway_id: frame}, ended=deliveries)


def cancelled(queue: Queue) -> list[str]:
    """What slots were told to give up."""
    return [notice.cancelled for notice in queue.read_notices(LANE, "0", 10)[1]]


async def test_an_answer_comes_back_from_a_slot(queue: Queue, client: Client) -> None:
    async with client.stream(REQUEST, "user") as stream:
        assert (stream.placement.version, stream.placement.arm) == ("small/1", "live")
        answer(queue, client, row(0), row(1, finish=FINISH))
        assert await read(stream) == [row(0), row(1, finish=FINISH)]
    assert cancelled(queue) == []


async def test_a_moved_request_tells_who_answered_it_and_how_it_was_queued(
    queue: Queue, client: Client
) -> None:
    async with client.stream(REQUEST, "user") as stream:
        queue.apply_route(Route("chat", "a", 2, live="small/0"))
        (moved,) = queue.pull(Lane("chat", "small/0"), "slot-0.a", 1, 500)
        frame = StepFrame("slot-0", "small/0", "fp", (row(0, finish=FINISH),))
        queue.send(Lane("chat", "small/0"), "slot-0.a", {client.gateway_id: frame}, ended=[moved])

        assert (await read(stream))[-1].finish == FINISH

    placement = stream.placement
    assert (placement.version, placement.generation, placement.arm) == ("small/0", 1, "live")


async def test_leaving_early_cancels_a_request_that_was_moved(queue: Queue, client: Client) -> None:
    async with client.stream(REQUEST, "user"):
        queue.apply_route(Route("chat", "a", 2, live="small/0"))

    assert queue.pull(Lane("chat", "small/0"), "slot-0.a", 1, 10) == []


async def test_leaving_early_cancels(queue: Queue, client: Client) -> None:
    async with client.stream(REQUEST, "user"):
        pass

    assert queue.pull(LANE, "slot-1.a", 1, 10) == []
    assert queue.read_bodies(["r1"]) == [None]


async def test_a_reader_that_is_cancelled_cancels_the_running_request(
    queue: Queue, client: Client
) -> None:
    is_waiting = asyncio.Event()

    async def handle() -> None:
        async with client.stream(REQUEST, "user") as stream:
            is_waiting.set()
            await read(stream)

    task = asyncio.create_task(handle())
    await is_waiting.wait()
    queue.pull(LANE, "slot-1.a", 1, 100)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    assert task.cancelled()
    assert cancelled(queue) == ["r1"]


async def test_a_cancellation_is_never_swallowed(client: Client) -> None:
    async def ask() -> None:
        while True:
            await client.endpoints()

    tasks = [asyncio.create_task(ask()) for _ in range(100)]
    for task in tasks:
        await asyncio.sleep(0.0005)
        task.cancel()
    _, still_running = await asyncio.wait(tasks, timeout=2)

    assert not still_running


async def test_a_stream_that_broke_on_the_way_is_cancelled_at_its_slot(
    queue: Queue, client: Client
) -> None:
    async with client.stream(REQUEST, "user") as stream:
        queue.pull(LANE, "slot-1.a", 1, 100)
        frame = StepFrame("slot-1", "small/1", "fp", (row(5),))
        queue.send(LANE, "slot-1.a", {client.gateway_id: frame})
        assert await read_code(stream) == "stream_gap"

    assert cancelled(queue) == ["r1"]


async def test_what_cannot_be_queued_is_told_on_entering(
    redis_url: str, queue: Queue, client: Client
) -> None:
    with pytest.raises(UnknownEndpoint):
        async with client.stream(replace(REQUEST, endpoint="other"), "user"):
            pytest.fail("an unknown endpoint was entered")
    queue.release(Lease("slot-1", "slot-1.a", 1), LANE)
    with pytest.raises(NoReadySlot):
        async with client.stream(REQUEST, "user"):
            pytest.fail("an endpoint without a slot was entered")


async def test_without_redis_requests_are_refused_and_the_log_is_kept() -> None:
    client = Client(NOWHERE)
    await client.start()
    client.record(RECORD)
    with pytest.raises(QueueUnavailable):
        async with client.stream(REQUEST, "user"):
            pytest.fail("a stream was entered without Redis")

    assert not client.is_connected
    assert client.num_dropped_records == 0
    await client.close()


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost requests are looked for all the time."""
    monkeypatch.setattr(client_module, "SILENT_S", 0.05)
    monkeypatch.setattr(client_module, "LOOK_FOR_LOST_EVERY_S", 0.05)


async def test_a_request_that_redis_has_lost_ends_long_before_its_deadline(
    redis_server: RedisServer, queue: Queue, looks_often: None, client: Client
) -> None:
    async with client.stream(REQUEST, "user") as stream:
        redis_server.flush()
        async with asyncio.timeout(5):
            assert await read_code(stream) == "request_lost"


async def test_a_request_that_waits_or_runs_in_silence_is_not_lost(
    queue: Queue, looks_often: None, client: Client
) -> None:
    async with client.stream(REQUEST, "user") as stream:
        await asyncio.sleep(0.3)
        deliveries = queue.pull(LANE, "slot-1.a", 1, 500)
        await asyncio.sleep(0.3)
        frame = StepFrame("slot-1", "small/1", "fp", (row(0, finish=FINISH),))
        queue.send(LANE, "slot-1.a", {client.gateway_id: frame}, ended=deliveries)
        assert await read(stream) == [row(0, finish=FINISH)]


async def test_records_are_written_in_the_background(queue: Queue, client: Client) -> None:
    for number in range(1_200):
        client.record(replace(RECORD, id=f"r{number}"))
    client.record(replace(RECORD, id="broken", total_s=math.nan))

    async with asyncio.timeout(5):
        while client._records:
            await asyncio.sleep(0.02)

    entries = queue.read_log("intake-1", 2_000)
    assert [entry.record for entry in entries] == [
        replace(RECORD, id=f"r{number}") for number in range(1_200)
    ]
    assert client.num_dropped_records == 1
    assert client.is_connected


async def test_a_full_buffer_drops_and_counts() -> None:
    client = Client(NOWHERE)
    for _ in range(client_module.MAX_BUFFERED_RECORDS + 3):
        client.record(RECORD)

    assert client.num_dropped_records == 3
    await client.close()


async def test_a_client_that_closes_ends_its_lease(redis_url: str, queue: Queue) -> None:
    client = Client(redis_url)
    await client.start()
    async with asyncio.timeout(5):
        while not client.is_connected:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert queue.find_absent([client.gateway_id]) == set()

    await client.close()

    assert queue.find_absent([client.gateway_id]) == {client.gateway_id}
