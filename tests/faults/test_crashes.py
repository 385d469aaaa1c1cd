"""Processes that are killed, and requests that kill: everybody gets a whole answer or a visible error."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.faults.history import Outcome, check
from tests.faults.instance import OLD, Instance
from tests.faults.load import Load
from tests.faults.operator import count_delivered, wait_until_drained
from tests.faults.states import slot_of
from tests.inference.slot_process import wait_until

MAX_REQUESTS = 32
NUM_STREAMS = 20
LONG = 200

pytestmark = pytest.mark.slow


async def test_every_stream_of_a_killed_slot_ends_whole_or_visibly(instance: Instance) -> None:
    slot = slot_of(instance.endpoint(), OLD)
    async with Load(instance.run, num_tokens=LONG) as load:
        for number in range(NUM_STREAMS):
            load.send(n=1 + number % 2)
        await asyncio.to_thread(wait_until, lambda: count_delivered(instance, OLD) == NUM_STREAMS)
        await asyncio.sleep(0.5)
        killed = instance.send(slot, signal.SIGKILL)
        records = await load.end()

        report = check(records, num_sent=load.num_sent, golden=instance.golden())
        assert report.is_clean, report
        assert report.counts[Outcome.OK] + report.counts[Outcome.FAILED] == NUM_STREAMS, report
        await asyncio.to_thread(wait_until, lambda: instance.pid(slot) not in (0, killed))
        again = await load.send()

    assert again.outcome is Outcome.OK
    await wait_until_drained(instance)


async def test_a_request_that_kills_its_process_ends_alone(instance: Instance) -> None:
    async with Load(instance.run, num_tokens=LONG) as load:
        mates = [load.send() for _ in range(9)]
        await asyncio.to_thread(wait_until, lambda: count_delivered(instance, OLD) == len(mates))
        poison = load.send("die")
        finished = await asyncio.gather(*mates)
        died = await poison
        records = await load.end()

    report = check(records, num_sent=load.num_sent, golden=instance.golden())
    assert report.is_clean, report
    assert {record.outcome for record in finished} == {Outcome.OK}, report
    assert (died.outcome, died.status, died.code) == (
        Outcome.FAILED,
        500,
        "request_crashed_engine",
    )
    with instance.redis() as connection:
        letters = [fields for _, fields in connection.xrange("dead")]
    assert [letter["version"] for letter in letters] == [OLD]
    await wait_until_drained(instance)
