"""Reports and failures of other releases, and broken ones: what can be read is, and nothing else is hidden."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from inference.queue import Queue
from inference.replicas import (
    LoadFailure,
    SlotState,
    SlotStatus,
    list_failures,
    list_slots,
)
from tests.inference.members import OTHER, RESIDENT, join


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        yield queue


def test_a_report_of_another_release_is_read(queue: Queue) -> None:
    text = SlotStatus("slot-1", "chat", "small/1", SlotState.READY, probe="abc").to_json()
    status = SlotStatus.from_json(text[:-1] + ',"new_field":1}', updated_at=5.0)
    assert (status.probe, status.state, status.updated_at) == ("abc", SlotState.READY, 5.0)
    old = SlotStatus.from_json('{"slot":"s","state":"ready"}', updated_at=1.0)
    assert (old.role, old.kernel) == ("", "")


def test_a_load_failure_of_another_release_is_read() -> None:
    text = '{"endpoint":"chat","version":"small/1","count":2,"new_field":1}'
    assert LoadFailure.from_json(text) == LoadFailure("chat", "small/1", count=2)


@pytest.mark.parametrize("text", ["{", "[]", "7", "{}", '{"slot":"slot-2","state":"unheard of"}'])
def test_an_entry_that_cannot_be_read_hides_no_other(
    redis_url: str, queue: Queue, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue.publish_desired([RESIDENT, OTHER])
    slot = join(queue, "slot-1")
    failure = slot.begin_load(RESIDENT, 1)
    with redis.Redis.from_url(redis_url) as client:
        client.hset("slots", "slot-2", f"{int(time.time() * 1000)} {text}")
        client.hset("failures", "chat:small/2", text)

    assert [status.slot for status in list_slots(queue)] == ["slot-1"]
    assert list_failures(queue) == [failure]
    assert "report cannot be read slot=slot-2" in caplog.text
    assert "load failure cannot be read version=chat:small/2" in caplog.text
    assert slot.begin_load(OTHER, 1).count == 1


BROKEN = [
    "{",
    "7",
    "null",
    "\xff",
    '{"endpoint":7,"version":{}}',
    '{"version":"small/1"}',
    '{"artifact":"/artifacts/1","retry_at_ms":"soon"}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_report_or_failure_stops_no_adoption(
    redis_url: str, queue: Queue, text: str
) -> None:
    queue.publish_desired([RESIDENT, OTHER])
    first, second = join(queue, "slot-1"), join(queue, "slot-2")
    with redis.Redis.from_url(redis_url) as client:
        client.hset("slots", "slot-3", f"{int(time.time() * 1000)} {text}")
        client.hset("failures", "chat:small/1", text)

    assert first.adopt() == RESIDENT
    assert second.adopt() == OTHER
    assert first.look_up(RESIDENT).resident == RESIDENT
