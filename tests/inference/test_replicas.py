"""Who holds which resident, on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from inference.protocol import Resident
from inference.queue import Queue
from inference.replicas import (
    Member,
    SlotState,
    list_failures,
    list_slots,
)
from tests.inference.members import OTHER, RESIDENT, crash, join


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    with Queue(redis_url) as queue:
        yield queue


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
    assert slot.look_up(RESIDENT).resident == RESIDENT

    queue.publish_desired([OTHER])
    assert slot.look_up(RESIDENT).resident is None
    slot.leave()
    slot.renew()

    assert slot.adopt() == OTHER


def test_a_changed_resident_is_not_the_one_that_was_loaded(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()

    queue.publish_desired([replace(RESIDENT, engine_options={"max_num_seqs": 8})])

    assert slot.look_up(RESIDENT).resident is None


def test_a_desired_state_that_is_lost_changes_nothing(redis_url: str, queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()

    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    slot.renew()

    assert slot.look_up(RESIDENT).resident == RESIDENT


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
    assert slot.look_up(RESIDENT).resident == RESIDENT


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


def role(resident: Resident, name: str) -> Resident:
    return replace(resident, role=name)


def test_a_change_of_role_alone_lets_go_of_nothing(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()
    assert slot.status.role == "live"

    queue.publish_desired([OTHER, role(RESIDENT, "previous")])

    assert slot.look_up(RESIDENT).resident == role(RESIDENT, "previous")
    assert slot.status.role == "previous"


def test_what_failed_is_left_alone_until_its_next_try_is_due(queue: Queue) -> None:
    queue.publish_desired([RESIDENT, OTHER])
    slots = [join(queue, f"slot-{number}") for number in range(3)]
    assert slots[0].adopt() == RESIDENT
    failure = slots[0].fail_load(slots[0].begin_load(RESIDENT, 1), "no such file")
    slots[0].leave()

    assert [slot.adopt() for slot in slots[1:]] == [OTHER, None]
    assert list_failures(queue) == [failure]
    time.sleep(1.05)

    assert slots[2].adopt() == RESIDENT


def test_a_slot_that_loads_is_reported_before_its_try_is_counted(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.adopt()
    assert list_slots(queue)[0].version == "", "Nothing was renewed since."

    slot.begin_load(RESIDENT, 1)

    assert [each.is_under_way for each in list_failures(queue)] == [True]
    assert list_slots(queue)[0].version == RESIDENT.version


def test_the_process_that_goes_on_for_another_has_its_lease_and_its_claim(queue: Queue) -> None:
    queue.publish_desired([RESIDENT, OTHER])
    before = Member(queue, "slot-1", lease_ms=200)
    before.renew()
    assert before.adopt() == RESIDENT
    left = before.hand_over(60_000)
    time.sleep(0.3)  # its own lease would be over
    bystander = join(queue, "slot-2")

    assert list_slots(queue)[0].version == RESIDENT.version
    assert bystander.adopt() == OTHER
    after = Member(queue, "slot-1", lease_ms=60_000, handover=left)
    assert after.renew()
    assert [each.version for each in list_slots(queue)] == [RESIDENT.version, ""]
    assert after.consumer == before.consumer
    assert after.adopt() == RESIDENT


def test_the_process_that_goes_on_for_another_reports_nothing_that_is_not_wanted_any_more(
    queue: Queue,
) -> None:
    queue.publish_desired([RESIDENT])
    before = join(queue, "slot-1")
    before.adopt()
    left = before.hand_over(60_000)
    queue.publish_desired([])

    after = Member(queue, "slot-1", lease_ms=60_000, handover=left)
    after.renew()

    assert after.adopt() is None
    assert after.status.version == ""


def test_tries_are_counted_across_processes_and_wait_longer_each_time(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    first, second = join(queue, "slot-1"), join(queue, "slot-2")
    first.adopt()
    first.begin_load(RESIDENT, 1)  # and the process dies
    [died] = list_failures(queue)
    assert (died.count, died.is_under_way) == (1, True)
    assert "process ended" in died.detail

    again = second.fail_load(second.begin_load(RESIDENT, 1), "no memory")

    assert list_failures(queue) == [again]
    assert (again.count, again.detail, again.is_under_way) == (2, "no memory", False)
    assert again.retry_at - time.time() == pytest.approx(2.0, abs=0.5)
    third = second.begin_load(replace(RESIDENT, artifact="/artifacts/mended"), 1)
    assert third.count == 1
    second.end_load(third)
    assert list_failures(queue) == []


def test_what_is_not_desired_any_more_has_not_failed(queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    slot = join(queue, "slot-1")
    slot.begin_load(RESIDENT, 1)
    queue.publish_desired([OTHER])
    slot.adopt()
    assert list_failures(queue) == []


@pytest.mark.parametrize(
    ("own", "free", "expected"),
    [
        ("live", "live", True),
        ("live", "previous", True),
        ("live", "candidate", False),
        ("candidate", "live", True),
        ("candidate", "candidate", True),
        ("candidate", "retired", False),
        ("retired", "candidate", True),
    ],
)
def test_who_cannot_load_has_an_alternative_in_what_is_wanted_as_much(
    queue: Queue, own: str, free: str, expected: bool
) -> None:
    queue.publish_desired([role(RESIDENT, own)])
    slot = join(queue, "slot-1")
    slot.adopt()
    assert not slot.look_up(RESIDENT).has_alternative

    queue.publish_desired([role(RESIDENT, own), role(OTHER, free)])
    assert slot.look_up(RESIDENT).has_alternative is expected

    slot.begin_load(OTHER, 1)
    assert not slot.look_up(RESIDENT).has_alternative


def test_the_least_wanted_slot_is_needed_by_a_live_version_without_one(queue: Queue) -> None:
    held = [
        Resident("chat", f"small/{number}", "/artifact", role=name)
        for number, name in enumerate(("live", "previous", "candidate", "retired"))
    ]
    queue.publish_desired(held)
    slots = [join(queue, f"slot-{number}") for number in range(4)]
    assert [slot.adopt() for slot in slots] == held

    def needed() -> list[bool]:
        pairs = zip(slots, held, strict=True)
        return [slot.look_up(each).is_needed_elsewhere for slot, each in pairs]

    assert needed() == [False] * 4
    queue.publish_desired([*held, Resident("other", "small/9", "/artifact")])
    assert needed() == [False, False, False, True]
    queue.publish_desired([*held, Resident("other", "small/9", "/artifact", role="candidate")])
    assert needed() == [False] * 4
    queue.publish_desired([held[0], *held])  # one more replica of what has a slot already
    assert needed() == [False] * 4
    broken = Resident("other", "small/9", "/artifact")
    queue.publish_desired([*held, broken])
    slots[0].begin_load(broken, 1)
    assert needed() == [False] * 4


def test_what_another_slot_says_it_has_is_not_free(redis_url: str, queue: Queue) -> None:
    queue.publish_desired([RESIDENT])
    holder, idle = join(queue, "slot-1"), join(queue, "slot-2")
    holder.adopt()
    holder.renew()
    with redis.Redis.from_url(redis_url) as client:
        client.delete("residents")

    assert idle.adopt() is None
    assert holder.look_up(RESIDENT).resident == RESIDENT
    holder.report(SlotState.DRAINING)
    holder.renew()
    with redis.Redis.from_url(redis_url) as client:
        client.delete("residents")
    assert idle.adopt() == RESIDENT


def test_an_idle_slot_lets_those_speak_first_who_held_something(queue: Queue) -> None:
    idle = Member(queue, "slot-1", lease_ms=400)
    idle.renew()
    assert idle.adopt() is None  # nothing is published: perhaps everything was lost
    queue.publish_desired([RESIDENT])
    assert idle.adopt() is None
    wait_and_renew(idle, 0.45)
    assert idle.adopt() == RESIDENT


def test_an_idle_slot_notices_a_loss_by_its_own_lease(redis_url: str, queue: Queue) -> None:
    idle = Member(queue, "slot-1", lease_ms=400)
    idle.renew()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    queue.publish_desired([RESIDENT])  # so soon that nobody saw it missing

    idle.renew()
    assert idle.adopt() is None
    wait_and_renew(idle, 0.45)
    assert idle.adopt() == RESIDENT


def wait_and_renew(member: Member, seconds: float) -> None:
    """Let time pass without letting the lease run out."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
        member.renew()
