"""Redis and the database go away and come back, with and without what they held."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx
import pytest

from inference.queue import Queue, QueueUnavailable
from tests.faults.history import Outcome, Report, check
from tests.faults.instance import NEW, OLD, ApiRefused, Instance
from tests.faults.load import Load
from tests.faults.operator import wait_until_drained
from tests.inference.slot_process import wait_until

MAX_REQUESTS = 32
RATE = 15.0
NUM_TOKENS = 60
ROUTE_RIGHT_S = 5.0
DATABASE_AWAY_S = 30.0
# Far beyond the first pauses of whoever waits for a connection.
REDIS_AWAY_S = 22.0
LOST_WITH_REDIS = {"request_lost", "stream_gap"}

pytestmark = pytest.mark.slow


async def test_a_killed_redis_comes_back_with_everything(instance: Instance) -> None:
    async with loaded(instance) as load:
        killed = await asyncio.to_thread(instance.send, "redis", signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: instance.pid("redis") not in (0, killed))
        await assert_route_is_right(instance)

    report = judge(instance, load)
    assert report.is_clean, report
    assert report.counts[Outcome.FAILED] == 0, f"What was accepted goes on: {report}"
    await assert_serves(instance)


async def test_a_redis_without_its_file_is_filled_again(instance: Instance) -> None:
    async with loaded(instance) as load:
        with instance.stopped("redis"):
            shutil.rmtree(instance.home.path / "redis")
            (instance.home.path / "redis").mkdir(mode=0o700)
        await assert_route_is_right(instance)

    report = judge(instance, load)
    assert report.is_clean, report
    assert codes_of_failed(load) <= LOST_WITH_REDIS, report
    await assert_serves(instance)


async def test_a_redis_that_was_away_for_long_is_filled_as_soon_as_it_is_back(
    instance: Instance,
) -> None:
    with instance.stopped("redis"):
        shutil.rmtree(instance.home.path / "redis")
        (instance.home.path / "redis").mkdir(mode=0o700)
        await asyncio.sleep(REDIS_AWAY_S)
    await assert_route_is_right(instance)
    await asyncio.to_thread(wait_until, instance.is_ready, timeout_s=ROUTE_RIGHT_S)
    await assert_serves(instance)


async def test_an_emptied_redis_is_filled_again(instance: Instance) -> None:
    async with loaded(instance) as load:
        with instance.redis() as connection:
            connection.flushall()
        await assert_route_is_right(instance)

    report = judge(instance, load)
    assert report.is_clean, report
    assert codes_of_failed(load) <= LOST_WITH_REDIS, report
    await assert_serves(instance)


async def test_without_the_database_the_last_route_is_served(instance: Instance) -> None:
    golden, generation = instance.golden(), instance.endpoint()["generation"]
    async with Load(instance.run) as load:
        with database_away(instance):
            sending = asyncio.create_task(load.run(rate=RATE, duration_s=DATABASE_AWAY_S))
            refusals = [
                await asyncio.to_thread(refusal_of, act)
                for act in (instance.rollback, lambda: instance.promote(NEW), instance.endpoint)
            ]
            await sending
        records = await load.end()

    report = check(records, num_sent=load.num_sent, golden=golden)
    assert report.is_clean, report
    assert report.counts == {Outcome.OK: load.num_sent}, report
    for response in refusals:
        assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE, response.text
        assert int(response.headers["retry-after"]) >= 1
    instance.wait_for(lambda state: (state["live"], state["generation"]) == (OLD, generation))
    await assert_serves(instance)


@asynccontextmanager
async def loaded(instance: Instance) -> AsyncIterator[Load]:
    """Some seconds of load, the block somewhere in it; every request has its outcome at the end."""
    async with Load(instance.run, num_tokens=NUM_TOKENS) as load:
        sending = asyncio.create_task(load.run(rate=RATE, duration_s=60.0))
        await asyncio.sleep(1.5)
        yield load
        await asyncio.sleep(1.5)
        sending.cancel()
        await load.end()


def codes_of_failed(load: Load) -> set[str]:
    """How answers ended that could not go on; whoever was refused before an answer began is not among them."""
    return {record.code for record in load.records if record.outcome is Outcome.FAILED}


def judge(instance: Instance, load: Load) -> Report:
    return check(load.records, num_sent=load.num_sent, golden=instance.golden())


async def assert_route_is_right(instance: Instance) -> None:
    """Within ``ROUTE_RIGHT_S`` of a Redis that answers, it says what the database says."""
    state = await asyncio.to_thread(instance.endpoint)
    name, wanted = instance.endpoint_name, (state["generation"], state["live"])

    def is_there() -> bool:
        with suppress(QueueUnavailable):
            queue.ping()
            return True
        return False

    def is_right() -> bool:
        route = queue.read_route(name)
        return route is not None and (route.generation, route.live) == wanted

    with Queue(instance.redis_url) as queue:
        await asyncio.to_thread(wait_until, is_there)
        await asyncio.to_thread(wait_until, is_right, timeout_s=ROUTE_RIGHT_S)


async def assert_serves(instance: Instance) -> None:
    """The next requests are all answered, and nothing of the fault is left."""
    async with Load(instance.run) as load:
        for _ in range(5):
            load.send()
        await load.end()
    report = judge(instance, load)
    assert report.counts == {Outcome.OK: 5}, report
    await wait_until_drained(instance)


@contextmanager
def database_away(instance: Instance) -> Iterator[None]:
    """Nobody can open the database until the block ends; what is open already cannot write to a file that has moved."""
    away = instance.database.with_suffix(".away")
    instance.database.rename(away)
    instance.database.mkdir()
    try:
        yield
    finally:
        instance.database.rmdir()
        away.rename(instance.database)


def refusal_of(act: Callable[[], object]) -> httpx.Response:
    """How the control API refuses."""
    with pytest.raises(ApiRefused) as refused:
        act()
    return refused.value.response
