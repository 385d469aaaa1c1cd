"""The engine loop and its intake around the instant engine, on a real Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inference.engine import intake as intake_module
from inference.engine.loop import EngineLoop
from inference.protocol import FinishReason
from inference.queue import Lease
from tests.inference.engine.loop_bench import LANE, Bench
from tests.inference.instant_engine import golden_text
from tests.inference.slot_process import wait_until


@pytest.fixture
def bench(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(intake_module, "PULL_BLOCK_MS", 50)
    monkeypatch.setattr(intake_module, "WATCH_BLOCK_MS", 50)
    bench = Bench(redis_url)
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


def test_rows_are_numbered_and_the_last_tells_what_was_used(bench: Bench) -> None:
    bench.start()
    bench.send("r1", "one two three")

    rows = bench.wait_for_last("r1")

    assert [(row.attempt, row.seq) for row in rows] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert "".join(row.text for row in rows) == golden_text(4)
    finish = rows[-1].finish
    assert finish is not None
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == (
        FinishReason.LENGTH,
        3,
        4,
    )
    assert 0 <= finish.queue_s <= finish.first_token_s <= finish.total_s < 5
    wait_until(lambda: bench.num_left() == 0)
    assert bench.queue.read_bodies(["r1"]) == [None]


def test_each_gateway_gets_one_frame_per_step(bench: Bench) -> None:
    for number in range(3):
        bench.send(f"ours-{number}", gateway="gw")
    bench.send("theirs", gateway="other")
    bench.start()
    bench.wait_for_last("ours-2")

    assert [len(rows) for rows in bench.frames("gw")] == [3, 3, 3, 3]
    assert [len(rows) for rows in bench.frames("other")] == [1, 1, 1, 1]


def test_a_request_that_nobody_waits_for_runs_and_writes_no_rows(bench: Bench) -> None:
    bench.start()
    bench.send("shadow", gateway="")

    wait_until(lambda: bench.num_left() == 0)

    assert len(bench.engine.batches) == 4
    assert bench.frames("") == []


@pytest.mark.parametrize(
    ("prompt", "code"),
    [("refuse me", "invalid_prompt"), ("this is too long", "context_length_exceeded")],
)
def test_a_refused_request_ends_with_its_first_row(bench: Bench, prompt: str, code: str) -> None:
    bench.start()
    bench.send("r1", prompt)

    (row,) = bench.wait_for_last("r1")

    assert row.seq == 0
    assert row.failure is not None
    assert (row.failure.code, row.failure.status) == (code, 400)
    wait_until(lambda: bench.num_left() == 0)


def test_a_failure_of_one_request_leaves_its_batch_mates_alone(bench: Bench) -> None:
    bench.send("bad", "nan")
    bench.send("good")
    bench.start()

    bad, good = bench.wait_for_last("bad"), bench.wait_for_last("good")

    assert [row.seq for row in bad] == [0, 1, 2]
    assert bad[-1].failure is not None
    assert good[-1].finish is not None


def test_a_cancelled_request_is_freed_within_200_ms(bench: Bench) -> None:
    bench.start(step_s=0.01)
    bench.send("r1", max_tokens=10_000)
    wait_until(lambda: bench.engine.has_unfinished)

    cancelled_at = time.monotonic()
    bench.cancel("r1")
    wait_until(lambda: not bench.engine.has_unfinished)

    assert time.monotonic() - cancelled_at < 0.2
    wait_until(lambda: bench.num_left() == 0)
    assert not any(row.is_last for row in bench.rows("r1"))


def test_a_request_cancelled_while_it_queues_is_never_run(bench: Bench) -> None:
    bench.send("r1")
    bench.cancel("r1")
    bench.start()
    bench.send("r2")
    bench.wait_for_last("r2")

    assert all("r1" not in batch for batch in bench.engine.batches)


def test_a_deadline_ends_a_running_request(bench: Bench) -> None:
    bench.start(step_s=0.01)
    bench.send("r1", max_tokens=10_000, deadline_s=0.3)

    rows = bench.wait_for_last("r1")

    assert rows[-1].failure is not None
    assert (rows[-1].failure.code, rows[-1].failure.status) == ("deadline_exceeded", 504)
    assert rows[-1].seq == len(rows) - 1 > 0
    assert not bench.engine.has_unfinished


def test_a_request_that_is_late_already_is_not_started(bench: Bench) -> None:
    bench.send("r1", deadline_s=0.05)
    time.sleep(0.1)
    bench.start()

    (row,) = bench.wait_for_last("r1")

    assert row.failure is not None
    assert row.failure.code == "deadline_exceeded"
    assert bench.engine.batches == []


def test_a_second_attempt_sends_the_same_rows_under_a_higher_number(bench: Bench) -> None:
    bench.send("r1")
    bench.deliver_in_vain(1)
    bench.start()

    rows = bench.wait_for_last("r1")

    assert [(row.attempt, row.seq) for row in rows] == [(2, 0), (2, 1), (2, 2), (2, 3)]


def test_on_its_last_attempt_a_request_runs_alone(bench: Bench) -> None:
    for number in range(2):
        bench.send(f"suspect-{number}")
    bench.deliver_in_vain(2)
    bench.start(step_s=0.01)
    for number in range(3):
        bench.send(f"fresh-{number}")
    for name in ("suspect-0", "suspect-1", "fresh-0", "fresh-1", "fresh-2"):
        assert bench.wait_for_last(name)[-1].finish is not None

    with_suspects = [batch for batch in bench.engine.batches if any("suspect" in i for i in batch)]
    assert {len(batch) for batch in with_suspects} == {1}
    assert bench.rows("suspect-0")[0].attempt == 3


def test_a_request_that_was_there_at_three_crashes_is_a_dead_letter(bench: Bench) -> None:
    bench.send("r1")
    bench.deliver_in_vain(3)
    bench.start()

    (row,) = bench.wait_for_last("r1")

    assert row.failure is not None
    assert (row.failure.code, row.failure.status) == ("request_crashed_engine", 500)
    assert bench.engine.batches == []
    assert bench.dead_letters() == ["r1"]
    wait_until(lambda: bench.num_left() == 0)


def test_suspects_are_taken_over_a_few_at_a_time(bench: Bench) -> None:
    for number in range(12):
        bench.send(f"suspect-{number}", max_tokens=20)
    bench.deliver_in_vain(1)
    bench.start(step_s=0.005)
    for number in range(12):
        bench.wait_for_last(f"suspect-{number}")

    assert max(len(batch) for batch in bench.engine.batches) == 8


def test_requests_of_a_gateway_that_is_gone_are_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "GATEWAY_GRACE_S", 0.1)
    monkeypatch.setattr(intake_module, "GATEWAYS_EVERY_S", 0.05)
    bench.start(step_s=0.01)
    bench.send("r1", max_tokens=10_000)
    wait_until(lambda: bench.engine.has_unfinished)

    bench.redis.delete("gateway:gw")
    wait_until(lambda: not bench.engine.has_unfinished)

    failure = bench.wait_for_last("r1")[-1].failure
    assert failure is not None
    assert failure.code == "gateway_lost"


def test_entries_delivered_in_a_lost_reply_are_run(bench: Bench) -> None:
    bench.send("r1")
    bench.queue.pull(LANE, bench.member.consumer, 1, 10)  # as if the reply had been lost
    loop = bench.start()
    bench.intake._reply_lost = True

    assert bench.wait_for_last("r1")[-1].finish is not None
    assert loop.tickets() == []


def test_draining_finishes_what_runs(bench: Bench) -> None:
    bench.start(step_s=0.02)
    bench.send("r1", max_tokens=10)
    wait_until(lambda: bench.engine.has_unfinished)

    bench.stop(drain_s=5.0)

    assert bench.rows("r1")[-1].finish is not None


def test_what_outlasts_a_drain_ends_visibly_or_is_given_back(bench: Bench) -> None:
    loop = bench.start(step_s=0.3)
    bench.send("started", max_tokens=1_000)
    wait_until(lambda: len(bench.rows("started")) > 0)
    bench.send("not-started")
    wait_until(lambda: len(loop.tickets()) == 2)

    bench.stop(drain_s=0.0)

    failure = bench.rows("started")[-1].failure
    assert failure is not None
    assert (failure.code, failure.status) == ("server_shutting_down", 503)
    assert bench.rows("not-started") == []
    bench.queue.release(Lease("slot-1", bench.member.consumer, 1), LANE)
    (left,) = bench.queue.claim(LANE, "heir.a", 10, 3)
    assert (left.entry.id, left.attempt) == ("not-started", 1)


def test_a_slot_that_lost_its_lease_drops_its_requests_and_takes_a_new_name(bench: Bench) -> None:
    loop = bench.start(step_s=0.01)
    bench.send("r1", max_tokens=60)
    wait_until(lambda: bench.engine.has_unfinished)
    before = bench.member.consumer

    loop.rejoin()
    wait_until(lambda: bench.member.consumer != before)
    bench.redis.delete(f"slot:{before}")
    bench.member.renew()

    rows = bench.wait_for_last("r1")
    assert [row.seq for row in rows if row.attempt == 2] == list(range(60))
    assert not any(row.is_last for row in rows if row.attempt == 1)


def test_nothing_is_taken_under_an_old_name_or_while_draining(bench: Bench) -> None:
    loop = EngineLoop(bench.engine, bench.queue, LANE, bench.member)
    bench.send("r1")
    deliveries = bench.queue.pull(LANE, bench.member.consumer, 1, 100)

    assert loop.take(deliveries, "slot-1.old") == []
    assert len(loop.take(deliveries, bench.member.consumer) or []) == 1
    loop.drain(1.0)
    assert loop.take(deliveries, bench.member.consumer) is None
