"""What slots report of an endpoint, and what a version lacks that cannot answer."""

from __future__ import annotations

from dataclasses import replace

from controlplane.endpoints.slots import Report, read_report, readiness
from inference.queue import LaneCount, Queue
from inference.replicas import LoadFailure, SlotState, SlotStatus
from tests.controlplane.endpoints.test_moves import V3, make_state
from tests.factories import hold_ready

READY = SlotStatus("s1", "chat", "tiny/2", SlotState.READY)
LOADING = SlotStatus("s2", "chat", "tiny/1", SlotState.LOADING, detail="3 of 30 layers")
ELSEWHERE = SlotStatus("s3", "search", "tiny/3", SlotState.READY)


def test_readiness_names_slots_and_lanes_of_each_filled_role() -> None:
    report = Report([READY, LOADING, ELSEWHERE], {"chat": [LaneCount("tiny/2", 5, 2)]})
    roles = readiness(state=make_state(candidate=V3), report=report)
    assert [(role.role, role.version, role.is_ready) for role in roles] == [
        ("live", "tiny/2", True),
        ("previous", "tiny/1", False),
        ("candidate", "tiny/3", False),
    ]
    assert [(role.queued, role.in_flight) for role in roles] == [(5, 2), (0, 0), (0, 0)]
    assert [slot.slot for slot in roles[1].slots] == ["s2"]


def test_what_is_missing_is_told_with_the_way_on() -> None:
    report = Report([READY, LOADING])
    assert report.tell_missing("chat", "tiny/1", has_role=True) == (
        "no slot holds it ready: s2 is loading (3 of 30 layers)"
    )
    assert "within seconds" in report.tell_missing("chat", "tiny/3", has_role=True)
    assert "the candidate first" in report.tell_missing("chat", "tiny/3", has_role=False)


def test_a_version_that_could_not_be_loaded_says_why() -> None:
    failure = LoadFailure("chat", "tiny/3", "/artifacts/3", 2, 0.0, "no memory for 9 GiB")
    report = replace(Report([READY]), failures=[failure])
    missing = report.tell_missing("chat", "tiny/3", has_role=True)
    assert "could not be loaded: no memory for 9 GiB" in missing
    assert "candidate first" in report.tell_missing("search", "tiny/3", has_role=False)


def test_a_first_try_is_no_failure_before_its_time_is_over(queue: Queue) -> None:
    now, _ = queue.read_reports()
    for version, count, retry_at in (("1", 1, now + 9), ("2", 1, now - 1), ("3", 2, now + 9)):
        failure = LoadFailure("chat", f"tiny/{version}", "/artifacts", count, retry_at, "oh")
        queue.put_failure(failure.lane, failure.to_json())
    failures = read_report(queue=queue).failures
    assert [failure.version for failure in failures] == ["tiny/2", "tiny/3"]


def test_a_ready_slot_that_fell_silent_is_not_ready(queue: Queue) -> None:
    hold_ready(queue, "chat", "tiny/1", "tiny/2")
    assert read_report(queue=queue).ready_versions("chat") == {"tiny/1", "tiny/2"}
    at_ms, _, text = queue._redis.hget("slots", "slot-chat-tiny-2").partition(" ")
    queue._redis.hset("slots", "slot-chat-tiny-2", f"{int(at_ms) - 3_000} {text}")
    report = read_report(queue=queue, endpoints=["chat"])
    assert report.ready_versions("chat") == {"tiny/1"}
    assert "has not reported for 3 s" in report.tell_missing("chat", "tiny/2", has_role=True)
