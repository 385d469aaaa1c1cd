"""Who holds which resident, on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from inference.protocol import Resident
from inference.queue import Queue
from inference.replicas import Member, SlotState, list_slots

RESIDENT = Resident("chat", "small/1", "/artifacts/1", {"max_num_seqs": 4})
OTHER = Resident("chat", "small/2", "/artifacts/2")


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        yield queue


def join(queue: Queue, slot: str) -> Member:
    member = Member(queue, slot, lease_ms=60_000)
    assert member.renew()
    return member


def crash(redis_url: str, member: Member) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"slot:{member.consumer}")


def test_each_resident_is_held_by_one_slot(queue: Queue) -> None:
    queue.publish_desired([RESIDENT, OTHER])
    slots = [join(queue, f"slot-{number}") for number in range(3)]

    assert [slot.adopt() for slot in slots] == [RESIDENT, OTHER, None]
    assert [slot.adopt() for slot in slots] == [RESIDENT, OTHER, None]


def test_a_resident_named_twice_has_two_replicas(queue: Queue) -> None:
    queue.publish_desired([RESIDENT, RESIDENT])
    slots = [join(queue, f"slot-{number}") for number in range(3)]

    assert [slot.adopt() for slot in slots] == [RESIDENT, RESIDENT, None]


@pytest.mark.parametrize("ending", ["crash", "leave"])
def test_a_resident_is_free_when_its_slot_is_gone(
    redis_url: str, queue: Queue, ending: str
) -> None:
    queue.publish_desired([RESIDENT])
    first, second = join(queue, "slot-1"), join(queue, "slot-2")
    assert first.adopt() == RESIDENT
    assert second.adopt() is None

    crash(redis_url, first) if ending == "crash" else first.leave()

    assert second.adopt() == RESIDENT


def test_a_slot_lets_go_of_what_is_not_desired_any_more(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()
    assert slot.still_holds(RESIDENT)

    queue.publish_desired([OTHER])
    assert not slot.still_holds(RESIDENT)
    slot.leave()
    slot.renew()

    assert slot.adopt() == OTHER


def test_a_changed_resident_is_not_the_one_that_was_loaded(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()

    queue.publish_desired([replace(RESIDENT, engine_options={"max_num_seqs": 8})])

    assert not slot.still_holds(RESIDENT)


def test_a_desired_state_that_is_lost_changes_nothing(redis_url: str, queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()

    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    slot.renew()

    assert slot.still_holds(RESIDENT)


def test_a_lost_lease_is_left_under_a_new_name(redis_url: str, queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()
    before = slot.consumer
    crash(redis_url, slot)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"fenced:{before}", "1")

    assert not slot.renew()
    slot.rejoin()

    assert slot.renew()
    assert slot.consumer != before
    assert slot.still_holds(RESIDENT)


def test_reports_tell_what_each_slot_does(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot, idle = join(queue, "slot-1"), join(queue, "slot-2")
    slot.adopt()
    slot.report(SlotState.FAILED, detail="artifact is broken", fingerprint="fp")
    slot.renew()

    first, second = list_slots(queue)

    assert (first.slot, first.endpoint, first.version) == ("slot-1", "chat", "small/1")
    assert (first.state, first.detail, first.fingerprint) == ("failed", "artifact is broken", "fp")
    assert abs(first.updated_at - time.time()) < 5
    assert (second.slot, second.state, second.version) == ("slot-2", "waiting", "")
    idle.leave()
    assert [status.slot for status in list_slots(queue)] == ["slot-1"]


def test_the_servers_clock_is_told_in_terms_of_our_own(queue: Queue) -> None:
    slot = join(queue, "slot-1")

    now_ms = int(queue.read_reports()[0] * 1000)

    assert slot.clock.to_monotonic(now_ms) == pytest.approx(time.monotonic(), abs=0.1)
