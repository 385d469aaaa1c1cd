"""A server that answers but cannot serve, and entries that cannot be read, on a real server where one can be had."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis
import redis.asyncio

from inference.protocol import Route, StepFrame, TokenRow
from inference.queue import AsyncQueue, Lane, Lease, OutageLog, Queue, QueueUnavailable
from inference.queue.link import translated

LANE = Lane("chat", "small/1")
LEASE = Lease("slot-1", "slot-1.a", 60_000)

pytestmark = pytest.mark.asyncio


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        yield queue


@pytest_asyncio.fixture
async def gateway(redis_url: str) -> AsyncIterator[AsyncQueue]:
    gateway = AsyncQueue(redis_url)
    yield gateway
    await gateway.close()


@pytest.fixture
def lacks_replicas(redis_url: str) -> Iterator[None]:
    """The server takes no writes before it has a replica, which it never gets."""
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)


def frame(seq: int) -> StepFrame:
    return StepFrame("slot-1", "small/1", "fp", (TokenRow("r1", 1, seq, f"t{seq} "),))


@pytest.mark.parametrize(
    "error",
    [
        redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
        redis.ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL"),
        redis.ResponseError("LOADING Redis is loading the dataset in memory"),
        redis.ResponseError("MASTERDOWN Link with MASTER is down"),
        redis.exceptions.MasterDownError("Link with MASTER is down"),
        redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.ResponseError("Command # 1 (SET a 1) of pipeline caused error: MISCONF No space"),
        redis.ResponseError(
            "Command # 1 (SET a 1) of pipeline caused error: ('MISCONF No space',)"
        ),
    ],
)
async def test_a_server_that_cannot_serve_is_unavailable(error: redis.ResponseError) -> None:
    with pytest.raises(QueueUnavailable), translated():
        raise error


@pytest.mark.parametrize(
    "text",
    [
        "BUSYGROUP Consumer Group name already exists",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "ERR Error running script: MISCONFIGURED",
        "Command # 1 (SET MISCONF BUSY) of pipeline caused error: ERR syntax error",
    ],
)
async def test_our_own_errors_stay_what_they_are(text: str) -> None:
    with pytest.raises(redis.ResponseError), translated():
        raise redis.ResponseError(text)


async def test_no_write_of_any_kind_is_taken_for_an_error_of_ours(
    queue: Queue, gateway: AsyncQueue, lacks_replicas: None
) -> None:
    with pytest.raises(QueueUnavailable, match="NOREPLICAS"):
        queue.put_keys({"key": "{}"})
    with pytest.raises(QueueUnavailable, match="NOREPLICAS"):
        queue.apply_route(Route("chat", "a", 1, live="small/1"))
    with pytest.raises(QueueUnavailable, match="NOREPLICAS"):
        queue.renew(LEASE, "{}", LANE, is_ready=True)
    with pytest.raises(QueueUnavailable, match="NOREPLICAS"):
        queue.send(LANE, "slot-1.a", {"gw": frame(0)})
    with pytest.raises(QueueUnavailable, match="NOREPLICAS"):
        await gateway.renew_gateway("gw")


@pytest.mark.parametrize(
    "fields",
    [
        {"frame": "{"},
        {"frame": "7"},
        {"frame": '["slot-1","small/1"]'},
        {"frame": '["slot-1","small/1","fp",[["r1",1,0,"t",{"reason":"unheard of"},null]]]'},
        {"frame": '["slot-1","small/1","fp",[["r1",1,0,"t",{},null]]]'},
        {"other": ""},
    ],
)
async def test_a_frame_that_cannot_be_read_stops_no_other(
    redis_url: str,
    queue: Queue,
    gateway: AsyncQueue,
    fields: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue.send(LANE, "slot-1.a", {"gw": frame(0)})
    with redis.Redis.from_url(redis_url) as client:
        client.xadd("out:gw", fields)
    queue.send(LANE, "slot-1.a", {"gw": frame(1)})

    last_id, frames = await gateway.read_frames("gw", "0", 10)

    assert frames == [frame(0), frame(1)]
    assert await gateway.read_frames("gw", last_id, 10) == (last_id, [])
    assert caplog.text.count("frame cannot be read gateway=gw") == 1


async def test_a_last_frame_that_cannot_be_read_is_not_read_again(
    redis_url: str, gateway: AsyncQueue
) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        entry_id = client.xadd("out:gw", {"frame": "{"})

    assert await gateway.read_frames("gw", "0", 10) == (entry_id, [])


async def test_an_outage_is_a_line_at_its_begin_and_one_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outages = OutageLog(logging.getLogger("test"))
    outages.end("lease", "gw")
    for _ in range(2):
        for _ in range(3):
            outages.warn("lease", "gw", QueueUnavailable("away"))
        outages.end("lease", "gw")
        outages.end("lease", "gw")

    begin, end = "lease waits for Redis name=gw error=away", "lease goes on name=gw waited_s=0.0"
    assert caplog.messages == [begin, end, begin, end]
