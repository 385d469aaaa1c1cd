"""What reaches a loop when routes change: notices of a lost route, and requests that slots of other versions lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inference.engine import intake as intake_module
from inference.protocol import Route
from inference.queue import Lane, Lease
from tests.inference.engine.loop_bench import LANE, Bench
from tests.inference.slot_process import wait_until

BAD = Lane("chat", "small/2")


@pytest.fixture
def bench(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(intake_module, "PULL_BLOCK_MS", 50)
    monkeypatch.setattr(intake_module, "WATCH_BLOCK_MS", 50)
    bench = Bench(redis_url)
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


def let_another_version_lose(bench: Bench, *request_ids: str) -> None:
    """Requests that a slot of the bad version had when it was taken back, and then died."""
    bench.queue.apply_route(Route("chat", "a", 2, live=BAD.version))
    bench.queue.renew(Lease("slot-2", "slot-2.a", 60_000), "{}", BAD, is_ready=True)
    for request_id in request_ids:
        bench.send(request_id, max_tokens=20)
    assert len(bench.queue.pull(BAD, "slot-2.a", 100, 10)) == len(request_ids)
    bench.queue.apply_route(Route("chat", "a", 3, live=LANE.version))
    bench.redis.delete("slot:slot-2.a")


def begin_both(bench: Bench) -> None:
    """One request that has sent a token, and one that cannot have."""
    bench.start(step_s=0.02)
    bench.send("begun", max_tokens=40)
    wait_until(lambda: len(bench.rows("begun")) > 1)
    bench.send("silent", "slow", max_tokens=1)
    wait_until(lambda: len(bench.engine.batches[-1]) == 2)


def test_a_request_without_a_token_is_returned_and_the_other_finishes(bench: Bench) -> None:
    begin_both(bench)

    bench.roll_back(in_flight="retry_if_no_token")
    wait_until(lambda: bench.waiting("small/0") == [("silent", 0)])

    assert bench.wait_for_last("begun")[-1].finish is not None
    wait_until(lambda: bench.num_left() == 0)
    assert bench.rows("silent") == []


def test_a_cut_ends_what_has_begun_and_returns_the_rest(bench: Bench) -> None:
    begin_both(bench)

    bench.roll_back(in_flight="cut")
    failure = bench.wait_for_last("begun")[-1].failure

    assert failure is not None
    assert (failure.code, failure.status) == ("version_rolled_back", 503)
    wait_until(lambda: bench.num_left() == 0)
    assert bench.waiting("small/0") == [("silent", 0)]
    assert not bench.engine.has_unfinished


def test_what_runs_finishes_unless_told_otherwise(bench: Bench) -> None:
    begin_both(bench)

    bench.roll_back(in_flight="finish")

    assert bench.wait_for_last("begun")[-1].finish is not None
    assert bench.wait_for_last("silent")[-1].finish is not None
    assert bench.waiting("small/0") == []


def test_a_notice_is_for_what_came_before_it(bench: Bench) -> None:
    bench.send("old")
    bench.queue.pull(LANE, "dead.a", 1, 10)
    bench.roll_back(in_flight="cut")
    bench.redis.delete("ready:chat:small/0")
    time.sleep(0.002)  # ids of entries tell milliseconds
    bench.queue.apply_route(Route("chat", "a", 3, live=LANE.version))
    bench.send("new")
    bench.start(
        step_s=0.01
    )  # reads the notice, which is from the time before the version was live again

    rows = bench.wait_for_last("new")

    assert rows[-1].finish is not None
    assert rows[0].attempt == 1


def test_a_request_may_come_back_to_the_slot_that_returned_it(bench: Bench) -> None:
    begin_both(bench)

    bench.roll_back(in_flight="retry_if_no_token")
    bench.queue.apply_route(Route("chat", "a", 3, live=LANE.version))

    assert bench.wait_for_last("silent")[-1].finish is not None
    wait_until(lambda: bench.num_left() == 0)


def test_suspects_of_another_version_are_taken_over_a_few_at_a_time(bench: Bench) -> None:
    names = [f"suspect-{number}" for number in range(12)]
    let_another_version_lose(bench, *names)

    bench.start(step_s=0.005)
    rows = [bench.wait_for_last(name) for name in names]

    assert {(each[0].seq, each[0].attempt) for each in rows} == {(-1, 2)}
    assert all(each[-1].finish is not None and each[-1].attempt == 2 for each in rows)
    assert max(len(batch) for batch in bench.engine.batches) == 8
    wait_until(lambda: bench.num_left() == 0)


def test_a_suspect_of_two_versions_runs_alone(bench: Bench) -> None:
    let_another_version_lose(bench, "suspect-0", "suspect-1")
    bench.queue.rescue(LANE, "slot-1", "fp")
    bench.deliver_in_vain(
        2
    )  # to a slot that dies before it sets them aside, and to one that claims them

    bench.start(step_s=0.005)
    bench.send("fresh", max_tokens=20)
    for name in ("suspect-0", "suspect-1", "fresh"):
        assert bench.wait_for_last(name)[-1].finish is not None

    assert bench.rows("suspect-0")[-1].attempt == 3
    with_suspects = [batch for batch in bench.engine.batches if any("suspect" in i for i in batch)]
    assert {len(batch) for batch in with_suspects} == {1}


def test_a_slot_whose_requests_were_taken_over_sends_nothing_and_takes_a_new_name(
    bench: Bench,
) -> None:
    bench.start(step_s=0.01)
    bench.send("r1", max_tokens=10_000)
    wait_until(lambda: len(bench.rows("r1")) > 1)
    before = bench.member.consumer

    bench.redis.set(f"fenced:{before}", "1")
    num_rows = len(bench.rows("r1"))
    wait_until(lambda: bench.member.consumer != before)

    assert not bench.engine.has_unfinished
    assert len(bench.rows("r1")) - num_rows <= 1  # one step may have been under way
