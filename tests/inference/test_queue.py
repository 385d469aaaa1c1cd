"""The scripts and streams, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio
import redis

from inference.protocol import (
    GenerateRequest,
    RequestRecord,
    Resident,
    Route,
    SamplingParams,
    StepFrame,
    TokenRow,
)
from inference.queue import (
    AsyncQueue,
    Lane,
    Lease,
    NoReadySlot,
    Queue,
    QueueFull,
    QueueUnavailable,
    UnknownEndpoint,
)

LIVE, CANDIDATE = Lane("chat", "small/1"), Lane("chat", "small/2")
ROUTE = Route("chat", incarnation="a", generation=3, live="small/1", queue_cap=2, salt="rollout-1")
NOWHERE = "redis://127.0.0.1:1/0"

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


def request(request_id: str = "r1", deadline_s: float = 30.0) -> GenerateRequest:
    return GenerateRequest(request_id, "chat", SamplingParams(), deadline_s, prompt="Hello")


def join(
    queue: Queue, lane: Lane = LIVE, consumer: str = "slot-1.a", lease_ms: int = 60_000
) -> str:
    """A ready slot."""
    lease = Lease(consumer.partition(".")[0], consumer, lease_ms)
    assert queue.renew(lease, "{}", lane, is_ready=True)
    return consumer


def crash(redis_url: str, consumer: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"slot:{consumer}")


async def test_a_request_is_placed_on_the_live_version(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(ROUTE)
    consumer = join(queue)

    placement = await gateway.enqueue(request(), "gw", "user")

    assert (placement.version, placement.generation, placement.arm) == ("small/1", 3, "live")
    (delivery,) = queue.pull(LIVE, consumer, 10, 100)
    assert (delivery.entry_id, delivery.attempt) == (placement.entry_id, 1)
    assert (delivery.entry.id, delivery.entry.gateway, delivery.entry.arm) == ("r1", "gw", "live")
    assert delivery.entry.deadline_ms - delivery.entry.arrival_ms == 30_000
    assert queue.read_bodies(["r1"]) == [request().to_json()]
    assert queue.find_absent(["gw", "other"]) == {"other"}


async def test_an_endpoint_without_a_route_is_unknown(queue: Queue, gateway: AsyncQueue) -> None:
    queue.publish_desired([])
    with pytest.raises(UnknownEndpoint):
        await gateway.enqueue(request(), "gw", "user")


async def test_an_emptied_server_knows_of_no_endpoint_and_no_key_that_they_are_not_there(
    queue: Queue, gateway: AsyncQueue
) -> None:
    with pytest.raises(QueueUnavailable):
        await gateway.enqueue(request(), "gw", "user")
    with pytest.raises(QueueUnavailable):
        await gateway.read_key("k1")


async def test_without_a_ready_slot_nothing_is_queued(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(ROUTE)
    lease = Lease("slot-1", "slot-1.a", 60_000)
    queue.renew(lease, "{}", LIVE, is_ready=False)

    with pytest.raises(NoReadySlot) as refusal:
        await gateway.enqueue(request(), "gw", "user")

    assert refusal.value.retry_after_s >= 1
    assert queue.read_bodies(["r1"]) == [None]


async def test_readiness_ends_with_its_time(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(ROUTE)
    join(queue, lease_ms=50)

    await asyncio.sleep(0.1)

    with pytest.raises(NoReadySlot):
        await gateway.enqueue(request(), "gw", "user")


async def test_only_what_waits_counts_against_the_cap(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(ROUTE)
    consumer = join(queue)
    for number in range(2):
        await gateway.enqueue(request(f"running-{number}"), "gw", "user")
    queue.pull(LIVE, consumer, 2, 100)
    for number in range(2):
        await gateway.enqueue(request(f"waiting-{number}"), "gw", "user")

    with pytest.raises(QueueFull) as refusal:
        await gateway.enqueue(request("refused"), "gw", "user")

    assert 1 <= refusal.value.retry_after_s <= 30
    assert queue.read_bodies(["refused"]) == [None]


async def test_a_full_queue_that_moves_fast_asks_to_wait_little(
    queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    consumer = join(queue)
    for number in range(20):
        await gateway.enqueue(request(f"done-{number}"), "gw", "user")
        queue.send(LIVE, consumer, {}, ended=queue.pull(LIVE, consumer, 1, 100))
    for number in range(2):
        await gateway.enqueue(request(f"waiting-{number}"), "gw", "user")

    with pytest.raises(QueueFull) as refusal:
        await gateway.enqueue(request("refused"), "gw", "user")

    assert refusal.value.retry_after_s == 1


async def test_the_candidate_gets_its_share_and_the_same_users_each_time(
    queue: Queue, gateway: AsyncQueue
) -> None:
    route = replace(ROUTE, candidate="small/2", canary_bp=2_500, queue_cap=10_000)
    queue.apply_route(route)
    join(queue)
    join(queue, CANDIDATE, "slot-2.a")

    async def arms(prefix: str) -> list[str]:
        return [
            (await gateway.enqueue(request(f"{prefix}-{user}"), "gw", f"user-{user}")).arm
            for user in range(400)
        ]

    first, again = await arms("first"), await arms("again")
    queue.apply_route(replace(route, generation=4, salt="rollout-2"))
    of_next_rollout = await arms("next")

    assert first == again
    assert 60 <= first.count("candidate") <= 140
    assert first != of_next_rollout


async def test_a_candidate_without_a_ready_slot_loses_no_request(
    queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(replace(ROUTE, candidate="small/2", canary_bp=10_000))
    join(queue)

    placement = await gateway.enqueue(request(), "gw", "user")

    assert (placement.version, placement.arm) == ("small/1", "live")


async def test_the_route_limits_the_deadline(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(replace(ROUTE, deadline_s=5.0))
    join(queue)

    assert (await gateway.enqueue(request(), "gw", "user")).deadline_s == 5.0


async def test_an_older_generation_never_replaces_a_later_one(queue: Queue) -> None:
    assert queue.apply_route(ROUTE).is_current
    assert queue.apply_route(ROUTE).is_current
    assert not queue.apply_route(replace(ROUTE, generation=2, live="small/0")).is_current
    assert queue.read_route("chat") == ROUTE

    recreated = replace(ROUTE, incarnation="b", generation=1, live="small/9")
    assert queue.apply_route(recreated).is_current
    assert queue.read_route("chat") == recreated


async def test_a_queued_request_is_cancelled_at_once(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(ROUTE)
    consumer = join(queue)
    await gateway.enqueue(request(), "gw", "user")

    assert await gateway.cancel("r1")

    assert queue.pull(LIVE, consumer, 10, 10) == []
    assert queue.read_bodies(["r1"]) == [None]


async def test_the_cancel_of_a_running_request_is_told_to_slots(
    queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    consumer = join(queue)
    await gateway.enqueue(request(), "gw", "user")
    queue.pull(LIVE, consumer, 10, 100)

    assert not await gateway.cancel("r1")

    last_id, notices = queue.read_notices(LIVE, "0", 10)
    assert [notice.cancelled for notice in notices] == ["r1"]
    assert queue.read_notices(LIVE, last_id, 10) == (last_id, [])


async def test_only_a_slot_without_a_lease_loses_its_entries(
    redis_url: str, queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    dead, heir = join(queue, consumer="slot-1.a"), join(queue, consumer="slot-2.a")
    await gateway.enqueue(request(), "gw", "user")
    (delivery,) = queue.pull(LIVE, dead, 10, 100)

    assert queue.claim(LIVE, heir, 10, 3) == []
    crash(redis_url, dead)
    (claimed,) = queue.claim(LIVE, heir, 10, 3)

    assert claimed == replace(delivery, attempt=2)
    assert queue.claim(LIVE, heir, 10, 3) == []


async def test_an_entry_on_its_last_attempt_is_claimed_alone(
    redis_url: str, queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    dead, heir = join(queue, consumer="slot-1.a"), join(queue, consumer="slot-2.a")
    for number in range(2):
        await gateway.enqueue(request(f"twice-{number}"), "gw", "user")
    queue.give_back(
        LIVE, dead, [replace(each, attempt=3) for each in queue.pull(LIVE, dead, 2, 100)]
    )
    for number in range(2):
        await gateway.enqueue(request(f"once-{number}"), "gw", "user")
    queue.pull(LIVE, dead, 2, 100)
    crash(redis_url, dead)

    def claim() -> list[tuple[str, int]]:
        return [(each.entry.id, each.attempt) for each in queue.claim(LIVE, heir, 10, 3)]

    assert [claim(), claim(), claim(), claim()] == [
        [("twice-0", 3)],
        [("twice-1", 3)],
        [("once-0", 2), ("once-1", 2)],
        [],
    ]


async def test_a_slot_that_lost_entries_cannot_renew_its_old_lease(
    redis_url: str, queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    lease = Lease("slot-1", "slot-1.a", 60_000)
    join(queue, consumer="slot-1.a")
    await gateway.enqueue(request(), "gw", "user")
    queue.pull(LIVE, "slot-1.a", 10, 100)

    crash(redis_url, "slot-1.a")
    assert queue.renew(lease, "{}", LIVE, is_ready=True) is not None  # nobody claimed: an outage
    crash(redis_url, "slot-1.a")
    queue.claim(LIVE, join(queue, consumer="slot-2.a"), 10, 3)

    assert queue.renew(lease, "{}", LIVE, is_ready=True) is None


async def test_a_late_end_leaves_the_entry_to_its_new_owner(
    redis_url: str, queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    zombie, heir = join(queue, consumer="slot-1.a"), join(queue, consumer="slot-2.a")
    await gateway.enqueue(request(), "gw", "user")
    delivered = queue.pull(LIVE, zombie, 10, 100)
    crash(redis_url, zombie)
    queue.claim(LIVE, heir, 10, 3)

    queue.send(LIVE, zombie, {}, ended=delivered)
    assert queue.read_bodies(["r1"]) == [request().to_json()]

    queue.send(LIVE, heir, {}, ended=delivered)
    assert queue.read_bodies(["r1"]) == [None]
    assert queue.find_unheard(LIVE, heir, set()) == []


async def test_what_is_given_back_does_not_count_as_tried(
    redis_url: str, queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    leaving, heir = join(queue, consumer="slot-1.a"), join(queue, consumer="slot-2.a")
    await gateway.enqueue(request(), "gw", "user")
    deliveries = queue.pull(LIVE, leaving, 10, 100)

    queue.give_back(LIVE, leaving, deliveries)
    queue.release(Lease("slot-1", leaving, 1), LIVE)

    assert queue.claim(LIVE, heir, 10, 3) == deliveries


async def test_entries_of_a_lost_reply_are_found_again(queue: Queue, gateway: AsyncQueue) -> None:
    queue.apply_route(ROUTE)
    consumer = join(queue)
    await gateway.enqueue(request("r1"), "gw", "user")
    await gateway.enqueue(request("r2"), "gw", "user")
    known, unheard = queue.pull(LIVE, consumer, 10, 100)

    assert queue.find_unheard(LIVE, consumer, {known.entry_id}) == [unheard]


async def test_frames_are_read_on_from_the_last_one(queue: Queue, gateway: AsyncQueue) -> None:
    frames = [
        StepFrame("slot-1", "small/1", "fp", (TokenRow("r1", 1, seq, f"t{seq} "),))
        for seq in (0, 1)
    ]
    queue.send(LIVE, "slot-1.a", {"gw": frames[0]})
    last_id, first = await gateway.read_frames("gw", "0", 10)
    queue.send(LIVE, "slot-1.a", {"gw": frames[1], "other": frames[0]})
    _, second = await gateway.read_frames("gw", last_id, 10)

    assert [first, second] == [[frames[0]], [frames[1]]]


async def test_the_log_repeats_what_was_not_acknowledged(queue: Queue, gateway: AsyncQueue) -> None:
    record = RequestRecord(
        "r1", "key", "chat", "small/1", 3, "live", "ok", 200, "stop", True, 3, 8, 0.1, 0.2, 0.9, 1e9
    )
    texts = [replace(record, id=name).to_json().encode() for name in ("r1", "r2")]
    await gateway.append_log([texts[0], b"{broken", texts[1]])

    first = queue.read_log("intake-1", 10)
    again = queue.read_log("intake-1", 10)
    queue.ack_log([entry.entry_id for entry in first])

    assert [entry.record for entry in first] == [replace(record, id=each) for each in ("r1", "r2")]
    assert again == first
    assert queue.read_log("intake-1", 10) == []


async def test_desired_residents_and_keys_come_back_as_published(
    queue: Queue, gateway: AsyncQueue
) -> None:
    resident = Resident("chat", "small/1", "/artifacts/1", {"num_threads": 2})
    assert queue.read_desired() is None
    queue.publish_desired([resident, resident])
    assert queue.read_desired() == [resident, resident]
    queue.put_keys({"k1": '{"scopes":[]}'})
    assert await gateway.read_key("k1") == '{"scopes":[]}'
    assert await gateway.read_key("k2") is None
    queue.apply_route(ROUTE)
    assert await gateway.endpoints() == ["chat"]


async def test_a_redis_that_is_away_is_one_error() -> None:
    gateway = AsyncQueue(NOWHERE)
    with Queue(NOWHERE) as queue, pytest.raises(QueueUnavailable):
        queue.ping()
    with pytest.raises(QueueUnavailable):
        await gateway.enqueue(request(), "gw", "user")
    await gateway.close()


async def test_a_redis_that_is_full_is_the_same_error(
    redis_url: str, queue: Queue, gateway: AsyncQueue
) -> None:
    queue.apply_route(ROUTE)
    join(queue)
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(QueueUnavailable):
                await gateway.enqueue(request(), "gw", "user")
        finally:
            client.config_set("maxmemory", "0")
    assert queue.read_bodies(["r1"]) == [None]
