"""What hung or dead slots of a version without a route had in their hands goes to the live version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference.client import Stream
from inference.protocol import GenerateRequest, SamplingParams, StepFrame, TokenRow
from inference.queue import Lane
from tests.inference.lane_bench import LaneBench, route

BAD, GOOD = Lane("chat", "small/2"), Lane("chat", "small/1")
FINGERPRINT = "good"


@pytest.fixture
def bench(redis_url: str) -> Iterator[LaneBench]:
    """The bad version is live, and a slot of each version is ready."""
    with LaneBench(redis_url) as bench:
        bench.queue.apply_route(route("small/2", 1))
        bench.join(BAD, "slot-bad.a")
        bench.join(GOOD, "slot-good.a")
        yield bench


def start(bench: LaneBench, *request_ids: str) -> None:
    """Let the bad version's slot have requests."""
    for request_id in request_ids:
        bench.enqueue(request_id)
    assert len(bench.pull(BAD, "slot-bad.a")) == len(request_ids)


def hang_and_roll_back(bench: LaneBench, generation: int = 2) -> None:
    bench.crash("slot-bad.a")
    bench.queue.apply_route(route("small/1", generation))


def rescue(bench: LaneBench, lane: Lane = GOOD) -> int:
    return bench.queue.rescue(lane, "slot-good", FINGERPRINT)


def notices(bench: LaneBench) -> list[StepFrame]:
    return [StepFrame.from_json(fields["frame"]) for _, fields in bench.redis.xrange("out:gw")]


def test_only_entries_without_a_lease_and_without_a_route_are_rescued(bench: LaneBench) -> None:
    start(bench, "r0")
    assert rescue(bench) == 0  # routed
    bench.queue.apply_route(route("small/1", 2))
    assert rescue(bench) == 0  # its slot lives
    bench.crash("slot-bad.a")
    assert rescue(bench, BAD) == 0  # not the live version

    assert rescue(bench) == 1

    assert (bench.ids(BAD), bench.ids(GOOD)) == ([], ["r0"])
    assert rescue(bench) == 0


def test_being_delivered_to_a_slot_that_hangs_counts_as_an_attempt(bench: LaneBench) -> None:
    start(bench, "r0")
    hang_and_roll_back(bench)
    rescue(bench)

    assert bench.pull(GOOD, "slot-good.a") == []  # set aside: a suspect is claimed
    (claimed,) = bench.claim(GOOD, "slot-good.a")

    assert (claimed.entry.id, claimed.entry.attempt, claimed.attempt) == ("r0", 1, 2)
    assert bench.queue.send(GOOD, "slot-good.a", {}, ended=[claimed])
    assert bench.standing() == []
    assert bench.queue.read_bodies(["r0"]) == [None]


def test_a_slot_that_dies_before_it_set_a_suspect_aside_costs_no_attempt(bench: LaneBench) -> None:
    start(bench, "r0")
    hang_and_roll_back(bench)
    rescue(bench)
    bench.queue.pull(GOOD, "slot-good.a", 10, 1)
    bench.crash("slot-good.a")

    (claimed,) = bench.claim(GOOD, bench.join(GOOD, "slot-good.b"))

    assert claimed.attempt == 2


def test_suspects_come_a_few_at_a_time_and_on_their_last_attempt_alone(bench: LaneBench) -> None:
    start(bench, *(f"r{number}" for number in range(5)))
    hang_and_roll_back(bench)
    rescue(bench)
    bench.pull(GOOD, "slot-good.a")

    assert len(bench.claim(GOOD, "slot-good.a", 3)) == 3
    bench.crash("slot-good.a")
    bench.join(GOOD, "slot-good.b")
    batches = [bench.claim(GOOD, "slot-good.b") for _ in range(4)]

    attempts = sorted([each.attempt for each in batch] for batch in batches)
    assert attempts == [[2, 2], [3], [3], [3]]


def test_a_request_that_hangs_every_version_is_given_up_in_the_end(bench: LaneBench) -> None:
    start(bench, "r0")
    for generation in range(2, 5):
        lane, consumer = (GOOD, "slot-good.a") if generation % 2 == 0 else (BAD, "slot-bad.a")
        bench.crash("slot-bad.a")
        bench.crash("slot-good.a")
        bench.join(lane, consumer := f"{consumer}{generation}")
        bench.redis.delete("fenced:slot-bad.a")
        bench.queue.apply_route(route(lane.version, generation))
        bench.queue.rescue(lane, "slot", "fp")
        bench.pull(lane, consumer)
        (claimed,) = bench.claim(lane, consumer)
        assert claimed.attempt == generation
        bench.crash(consumer)

    assert claimed.attempt > 3


def test_a_suspect_that_waits_keeps_its_attempts_when_the_route_changes_again(
    bench: LaneBench,
) -> None:
    start(bench, "r0")
    hang_and_roll_back(bench)
    rescue(bench)

    assert bench.queue.apply_route(route("small/3", 3)).num_requeued == 1

    newest = Lane("chat", "small/3")
    consumer = bench.join(newest, "slot-newest.a")
    assert bench.pull(newest, consumer) == []
    assert [each.attempt for each in bench.claim(newest, consumer)] == [2]


def test_the_slot_that_lost_its_requests_is_fenced(bench: LaneBench) -> None:
    start(bench, "r0")
    hang_and_roll_back(bench)
    rescue(bench)

    frame = StepFrame("slot-bad", "small/2", "bad", (TokenRow("r0", 1, 0, "late"),))
    assert not bench.queue.send(BAD, "slot-bad.a", {"gw": frame})

    assert frame not in notices(bench)


def test_a_stream_that_began_elsewhere_ends_at_once_and_others_go_on(bench: LaneBench) -> None:
    start(bench, "begun", "waiting")
    streams = {
        name: Stream(GenerateRequest(name, "chat", SamplingParams(), 30.0))
        for name in ("begun", "waiting", "equal")
    }
    row = TokenRow("begun", 1, 0, "t0 ")
    streams["begun"].take(StepFrame("slot-bad", "small/2", "bad", (row,)), row)
    streams["equal"].take(StepFrame("slot-bad", "small/2", FINGERPRINT, (row,)), row)
    hang_and_roll_back(bench)
    rescue(bench)

    (frame,) = notices(bench)
    assert frame.version == "small/1"
    assert [(each.request_id, each.attempt, each.seq) for each in frame.rows] == [
        ("begun", 2, -1),
        ("waiting", 2, -1),
    ]
    for name, row in zip(streams, (*frame.rows, frame.rows[0]), strict=True):
        streams[name].take(frame, row)

    failures = {name: [each.failure for each in stream._rows] for name, stream in streams.items()}
    assert failures["begun"][0] is None
    assert failures["begun"][1] is not None
    assert failures["begun"][1].code == "slot_lost"
    assert (failures["waiting"], failures["equal"]) == ([], [None])


def test_a_late_row_of_the_slot_that_hung_is_dropped(bench: LaneBench) -> None:
    start(bench, "r0")
    hang_and_roll_back(bench)
    rescue(bench)
    stream = Stream(GenerateRequest("r0", "chat", SamplingParams(), 30.0))
    (frame,) = notices(bench)
    stream.take(frame, frame.rows[0])

    late = TokenRow("r0", 1, 0, "late")
    stream.take(StepFrame("slot-bad", "small/2", "bad", (late,)), late)

    assert stream._rows == []


def test_a_cancel_finds_a_request_that_was_rescued(bench: LaneBench) -> None:
    start(bench, "r0", "r1")
    hang_and_roll_back(bench)
    rescue(bench)

    assert bench.cancel("r0")
    bench.pull(GOOD, "slot-good.a")
    bench.cancel("r1")  # set aside: its slot finds no body

    assert bench.ids(GOOD) == ["r1"]
    (claimed,) = bench.claim(GOOD, "slot-good.a")
    assert bench.queue.read_bodies([claimed.entry.id]) == [None]


def test_what_a_leaving_slot_gave_back_is_fresh_for_the_live_version(bench: LaneBench) -> None:
    bench.enqueue("r0")
    deliveries = bench.pull(BAD, "slot-bad.a")
    bench.queue.give_back(BAD, "slot-bad.a", deliveries)
    hang_and_roll_back(bench)
    rescue(bench)

    (delivery,) = bench.pull(GOOD, "slot-good.a")

    assert (delivery.attempt, delivery.entry.attempt) == (1, 0)


def test_a_version_without_a_route_takes_over_only_while_the_live_one_cannot(
    bench: LaneBench,
) -> None:
    start(bench, "r0")
    hang_and_roll_back(bench)
    bench.join(BAD, "slot-bad.b")

    assert bench.claim(BAD, "slot-bad.b") == []
    bench.redis.delete("ready:chat:small/1")
    (claimed,) = bench.claim(BAD, "slot-bad.b")

    assert claimed.attempt == 2
