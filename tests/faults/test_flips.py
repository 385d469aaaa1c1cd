"""Promote and rollback under load, and a rollback away from a process that hangs."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.faults.history import Outcome, check
from tests.faults.instance import NEW, OLD, STEP_S, Instance
from tests.faults.load import Load, measure_capacity
from tests.faults.operator import Flips, count_delivered, count_queued, wait_until_drained
from tests.faults.states import slot_of
from tests.inference.instant_engine import SLOW_STEPS
from tests.inference.slot_process import wait_until

MAX_REQUESTS = 10
NUM_TOKENS = 16
NUM_CYCLES = 20
BETWEEN_FLIPS_S = 0.35
BURST = 8
LEASE_S = 2.0

pytestmark = pytest.mark.slow


async def test_twenty_cycles_under_load_fail_lose_and_repeat_nothing(instance: Instance) -> None:
    capacity = await measure_capacity(
        instance.run, num_tokens=NUM_TOKENS, concurrency=2 * MAX_REQUESTS, duration_s=3.0
    )
    flips = Flips(instance)
    async with Load(instance.run, num_tokens=NUM_TOKENS) as load:
        rate = 0.6 * capacity.requests_per_s
        sending = asyncio.create_task(load.run(rate=rate, duration_s=120.0, burst=BURST))
        for _ in range(NUM_CYCLES):
            await asyncio.sleep(BETWEEN_FLIPS_S)
            await flips.flip(lambda: instance.promote(NEW))
            await asyncio.sleep(BETWEEN_FLIPS_S)
            await flips.flip(instance.rollback)
        sending.cancel()
        records = await load.end()

    report = check(
        records, num_sent=load.num_sent, golden=instance.golden(), timeline=flips.timeline
    )
    told = f"{capacity}, {rate:.0f} requests/s; {report}"
    assert report.is_clean, told
    assert report.counts == {Outcome.OK: load.num_sent}, told
    assert {record.version for record in records} == {OLD, NEW}
    assert sum(reply["requeued"] for reply in flips.replies) > 0, "No flip moved a queue."
    assert [reply["live"] for reply in flips.replies] == [NEW, OLD] * NUM_CYCLES
    await wait_until_drained(instance)


async def test_a_version_that_hangs_is_left_within_a_second(instance: Instance) -> None:
    flips = Flips(instance)
    await flips.flip(lambda: instance.promote(NEW))
    slot = slot_of(instance.endpoint(), NEW)
    async with Load(instance.run, num_tokens=NUM_TOKENS) as load:
        begun = [load.send(num_tokens=1_000) for _ in range(7)]
        tokenless = [load.send("slow") for _ in range(3)]
        await asyncio.to_thread(wait_until, lambda: count_delivered(instance, NEW) == MAX_REQUESTS)
        await asyncio.sleep(0.2)
        queued = [load.send() for _ in range(30)]
        await asyncio.to_thread(wait_until, lambda: count_queued(instance, NEW) == 30)
        frozen_at = time.monotonic()
        with instance.frozen(slot):
            took_s = await flips.flip(instance.rollback)
            fresh = [load.send() for _ in range(10)]
            served = await asyncio.gather(*queued, *fresh)
            moved = await asyncio.gather(*tokenless)
            ended = await asyncio.gather(*begun)
        records = await load.end()

    report = check(
        records, num_sent=load.num_sent, golden=instance.golden(), timeline=flips.timeline
    )
    assert report.is_clean, report
    assert took_s < 1.0
    reply = flips.replies[-1]
    assert (reply["live"], reply["requeued"], reply["in_flight"]) == (OLD, 30, MAX_REQUESTS)
    answers = {(record.outcome, record.version) for record in [*served, *moved]}
    assert answers == {(Outcome.OK, OLD)}, report
    # A second for the queue of 30 with 16 tokens of 10 ms, ten at a time; the slow ones rest SLOW_STEPS before a token.
    assert max(record.completed_at for record in served) - flips.answered_at < 3.0
    slow_s = SLOW_STEPS * STEP_S
    assert max(record.first_at or 0 for record in moved) - frozen_at < LEASE_S + 1 + slow_s + 1
    assert {(record.outcome, record.code) for record in ended} == {(Outcome.FAILED, "slot_lost")}
    await wait_until_drained(instance)
