"""A change of route takes along what waits, loses nothing, and tells slots what to do with what runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from inference.protocol import StepFrame, TokenRow
from inference.queue import Applied, Lane, LaneCount
from tests.inference.lane_bench import LaneBench, route

BAD, GOOD = Lane("chat", "small/2"), Lane("chat", "small/1")
PROMOTED, ROLLED_BACK = route("small/2", 1), route("small/1", 2)


@pytest.fixture
def bench(redis_url: str) -> Iterator[LaneBench]:
    """The bad version is live, and a slot of each version is ready."""
    with LaneBench(redis_url) as bench:
        bench.queue.apply_route(PROMOTED)
        bench.join(BAD, "slot-bad.a")
        bench.join(GOOD, "slot-good.a")
        yield bench


def test_what_waits_moves_to_the_live_version_in_order_and_keeps_its_times(
    bench: LaneBench,
) -> None:
    for number in range(5):
        bench.enqueue(f"r{number}")
    before = [each.entry for each in bench.standing()]

    applied = bench.queue.apply_route(ROLLED_BACK)

    assert applied == Applied(is_current=True, num_requeued=5, num_in_flight=0)
    assert [(each.lane, each.entry) for each in bench.standing()] == [(GOOD, e) for e in before]
    assert [(each.entry.generation, each.entry.arm) for each in bench.standing()] == [
        (1, "live")
    ] * 5
    assert bench.where(*(f"r{number}" for number in range(5))) == [
        ("chat:small/1", each.entry_id) for each in bench.standing()
    ]
    assert all(bench.redis.pttl(f"req:r{number}") > 60_000 for number in range(5))
    deliveries = bench.pull(GOOD, "slot-good.a")
    assert [(each.entry.id, each.attempt) for each in deliveries] == [
        (f"r{number}", 1) for number in range(5)
    ]
    assert None not in bench.queue.read_bodies([each.entry.id for each in deliveries])


def test_what_runs_is_counted_and_stays(bench: LaneBench) -> None:
    for number in range(5):
        bench.enqueue(f"r{number}")
    running = bench.pull(BAD, "slot-bad.a", 2)

    assert bench.queue.apply_route(ROLLED_BACK) == Applied(True, 3, 2)

    assert bench.ids(BAD) == ["r0", "r1"]
    assert bench.queue.send(BAD, "slot-bad.a", {}, ended=running)
    assert bench.ids(BAD) == []
    assert bench.queue.read_bodies(["r0", "r2"])[0] is None


def test_a_repeated_or_older_route_moves_nothing(bench: LaneBench) -> None:
    bench.enqueue("r0")
    bench.queue.apply_route(ROLLED_BACK)
    bench.enqueue("r1")
    before = bench.standing()

    assert bench.queue.apply_route(ROLLED_BACK) == Applied(True)
    assert bench.queue.apply_route(PROMOTED) == Applied(False)

    assert bench.standing() == before
    assert bench.queue.read_route("chat") == ROLLED_BACK


def test_an_incarnation_that_gave_way_does_not_come_back(bench: LaneBench) -> None:
    restored = replace(PROMOTED, incarnation="b", live="small/1")
    assert bench.queue.apply_route(restored).is_current

    assert not bench.queue.apply_route(replace(PROMOTED, generation=99)).is_current

    assert bench.queue.read_route("chat") == restored


def test_a_candidate_keeps_its_lane_only_while_it_has_a_share(bench: LaneBench) -> None:
    canary = route("small/1", 2, candidate="small/2", canary_bp=10_000)
    bench.queue.apply_route(canary)
    assert bench.enqueue("r0").version == "small/2"
    bench.queue.apply_route(replace(canary, generation=3, canary_bp=1))
    assert bench.ids(BAD) == ["r0"]

    assert bench.queue.apply_route(replace(canary, generation=4, canary_bp=0)).num_requeued == 1

    assert bench.ids(GOOD) == ["r0"]


def test_endpoints_that_share_a_version_do_not_share_a_queue(bench: LaneBench) -> None:
    bench.queue.apply_route(replace(PROMOTED, endpoint="code"))
    bench.join(Lane("code", "small/2"), "slot-code.a")
    bench.enqueue("ours")
    bench.enqueue("theirs", endpoint="code")

    bench.queue.apply_route(ROLLED_BACK)

    assert bench.ids(GOOD) == ["ours"]
    assert bench.ids(Lane("code", "small/2")) == ["theirs"]


def test_a_cancel_finds_a_request_that_was_moved(bench: LaneBench) -> None:
    bench.enqueue("r0")
    bench.enqueue("r1")
    bench.queue.apply_route(ROLLED_BACK)

    assert bench.cancel("r0")
    bench.pull(GOOD, "slot-good.a")
    assert not bench.cancel("r1")

    assert bench.ids(GOOD) == ["r1"]  # until its slot, which was told, ends it
    assert [each.cancelled for each in bench.queue.read_notices(GOOD, "0", 1)[1]] == ["r1"]
    assert bench.queue.read_notices(BAD, "0", 1)[1] == []


def test_what_nobody_waits_for_any_more_is_not_moved(bench: LaneBench) -> None:
    bench.enqueue("r0")
    bench.redis.delete("req:r0")

    assert bench.queue.apply_route(ROLLED_BACK).num_requeued == 0

    assert bench.standing() == []
    assert bench.redis.exists("req:r0") == 0


def test_the_policy_is_told_once_and_only_where_requests_run(bench: LaneBench) -> None:
    bench.queue.apply_route(ROLLED_BACK, in_flight="cut")
    assert bench.queue.read_notices(BAD, "0", 1)[1] == []
    bench.queue.apply_route(replace(PROMOTED, generation=3))
    bench.enqueue("r0")
    (running,) = bench.pull(BAD, "slot-bad.a")

    for _ in range(2):
        bench.queue.apply_route(replace(ROLLED_BACK, generation=4), in_flight="cut")

    (notice,) = bench.queue.read_notices(BAD, "0", 1)[1]
    assert (notice.in_flight, notice.generation) == ("cut", 4)
    assert running.placed_ms <= notice.at_ms


@pytest.mark.parametrize("policy", ["cut", "retry_if_no_token"])
def test_only_a_lane_that_loses_its_route_with_this_change_is_told(
    bench: LaneBench, policy: str
) -> None:
    bench.enqueue("finishes")
    bench.pull(BAD, "slot-bad.a")
    bench.queue.apply_route(replace(ROLLED_BACK, live="small/3"))  # a promote: the old one finishes
    worse = Lane("chat", "small/3")
    bench.join(worse, "slot-worse.a")
    bench.enqueue("suffers")
    bench.pull(worse, "slot-worse.a")

    bench.queue.apply_route(replace(ROLLED_BACK, generation=3), in_flight=policy)

    (notice,) = bench.queue.read_notices(worse, "0", 1)[1]
    assert (notice.in_flight, notice.generation) == (policy, 3)
    assert bench.queue.read_notices(BAD, "0", 1)[1] == []


def test_a_lane_that_was_rolled_back_is_not_told_again_by_later_changes(bench: LaneBench) -> None:
    bench.enqueue("r0")
    bench.pull(BAD, "slot-bad.a")
    for generation in (2, 3, 4):
        bench.queue.apply_route(replace(ROLLED_BACK, generation=generation), in_flight="cut")

    (notice,) = bench.queue.read_notices(BAD, "0", 1)[1]
    assert notice.generation == 2


def test_what_a_slot_returns_is_as_if_never_delivered(bench: LaneBench) -> None:
    bench.enqueue("r0")
    (delivery,) = bench.pull(BAD, "slot-bad.a")
    bench.queue.apply_route(ROLLED_BACK)

    for _ in range(2):  # a reply may be lost
        bench.queue.send(BAD, "slot-bad.a", {}, returned=[delivery])

    (moved,) = bench.pull(GOOD, "slot-good.a")
    assert (moved.entry, moved.attempt) == (delivery.entry, 1)
    assert len(bench.standing()) == 1


def test_a_consumer_cannot_return_or_give_back_what_it_lost(bench: LaneBench) -> None:
    bench.enqueue("r0")
    lost = bench.pull(BAD, "slot-bad.a")
    bench.crash("slot-bad.a")
    (claimed,) = bench.claim(BAD, bench.join(BAD, "slot-bad.b"))

    bench.queue.send(BAD, "slot-bad.a", {}, returned=lost)
    bench.queue.give_back(BAD, "slot-bad.a", lost)

    (standing,) = bench.standing()
    assert (standing.lane, standing.consumer, standing.deliveries) == (BAD, "slot-bad.b", 2)
    assert claimed.attempt == 2


def test_lanes_are_counted_while_they_are_routed_or_not_empty(bench: LaneBench) -> None:
    for number in range(5):
        bench.enqueue(f"r{number}")
    running = bench.pull(BAD, "slot-bad.a", 2)
    assert bench.queue.read_lanes("chat") == [LaneCount("small/2", 3, 2)]

    bench.queue.apply_route(ROLLED_BACK)
    assert bench.queue.read_lanes("chat") == [
        LaneCount("small/1", 3, 0),
        LaneCount("small/2", 0, 2),
    ]

    bench.queue.send(BAD, "slot-bad.a", {}, ended=running)
    bench.queue.apply_route(ROLLED_BACK)
    assert bench.queue.read_lanes("chat") == [LaneCount("small/1", 3, 0)]
    assert bench.queue.read_lanes("unknown") == []


def test_a_fenced_consumer_is_not_heard_and_ends_nothing(bench: LaneBench) -> None:
    bench.enqueue("r0")
    delivered = bench.pull(BAD, "slot-bad.a")
    frame = StepFrame("slot-bad", "small/2", "fp", (TokenRow("r0", 1, 0, "t0 "),))
    assert bench.queue.send(BAD, "slot-bad.a", {"gw": frame})
    bench.redis.set("fenced:slot-bad.a", "1")

    assert not bench.queue.send(BAD, "slot-bad.a", {"gw": frame}, ended=delivered)

    assert bench.redis.xlen("out:gw") == 1
    assert bench.ids(BAD) == ["r0"]
    assert bench.queue.read_bodies(["r0"]) != [None]


def test_a_hundred_queued_requests_move_there_and_back_whole(bench: LaneBench) -> None:
    for number in range(100):
        bench.enqueue(f"r{number}")
    for generation in range(2, 22):
        applied = bench.queue.apply_route(route(f"small/{generation % 2 + 1}", generation))
        assert applied.num_requeued == 100

    assert len(bench.standing()) == 100
