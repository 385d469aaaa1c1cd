"""Stopping a whole instance: answers end whole or with a visible error, and no process is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.history import Outcome, check, find_leftovers
from tests.faults.instance import Instance
from tests.faults.load import Load

NUM_CHATS = 32

pytestmark = pytest.mark.slow


@pytest.fixture
def instance(prepared_home: Path, tmp_path: Path) -> Iterator[Instance]:
    with Instance(prepared_home, tmp_path / "home", max_requests=NUM_CHATS) as instance:
        yield instance


async def test_short_answers_are_finished_first_and_the_next_start_serves(
    instance: Instance,
) -> None:
    """The answers take two seconds, which is within every process's time to drain."""
    async with Load(instance.run, num_tokens=200) as load:
        chats = [load.send() for _ in range(NUM_CHATS)]
        await asyncio.sleep(0.5)
        instance.send_sigterm()
        status = await asyncio.to_thread(instance.wait)
        await asyncio.gather(*chats)
        records = await load.end()

    report = check(records, num_sent=NUM_CHATS, golden=instance.golden())
    assert report.is_clean, report
    assert report.counts == {Outcome.OK: NUM_CHATS}, report
    assert status == 0

    await asyncio.to_thread(instance.start)
    async with Load(instance.run) as load:
        for _ in range(NUM_CHATS):
            load.send()
        records = await load.end()
    report = check(records, num_sent=NUM_CHATS, golden=instance.golden())
    assert report.counts == {Outcome.OK: NUM_CHATS}, report
    with instance.redis() as connection:
        assert not find_leftovers(connection)


async def test_answers_that_are_too_long_end_with_an_error(instance: Instance) -> None:
    async with Load(instance.run) as load:
        for _ in range(NUM_CHATS):
            load.send(num_tokens=100_000)
        await asyncio.sleep(0.5)
        instance.send_sigterm()
        status = await asyncio.to_thread(instance.wait)
        records = await load.end()

    report = check(records, num_sent=NUM_CHATS, golden=instance.golden())
    assert report.is_clean, report
    assert report.counts == {Outcome.FAILED: NUM_CHATS}, report
    assert status == 0
