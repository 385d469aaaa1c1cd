"""Copies in a slot, around the instant engine and on a real Redis: what is answered, and who makes way for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inference.engine import copies as copies_module
from inference.engine import copy_intake as copy_intake_module
from inference.engine import intake as intake_module
from inference.queue import Lease
from tests.inference.engine.copy_bench import CopyBench
from tests.inference.engine.loop_bench import LANE
from tests.inference.instant_engine import golden_score, golden_text
from tests.inference.slot_process import wait_until


@pytest.fixture
def bench(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyBench]:
    for module, name in ((intake_module, "PULL_BLOCK_MS"), (intake_module, "WATCH_BLOCK_MS")):
        monkeypatch.setattr(module, name, 20)
    monkeypatch.setattr(copy_intake_module, "LOOK_EVERY_S", 0.01)
    bench = CopyBench(redis_url)
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


def test_the_whole_answer_of_a_copy_is_written(bench: CopyBench) -> None:
    bench.start_instant()
    bench.copy("r1", "one two three")

    answer = bench.wait_for_answer("r1")

    assert (answer.outcome, answer.text, answer.finish_reason) == ("ok", golden_text(4), "length")
    assert (answer.arm, answer.version, answer.fingerprint) == ("golden", "small/1", "instant")
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 4)
    assert 0 <= answer.total_s < 5
    assert abs(answer.at - time.time()) < 5
    assert bench.num_copies() == 0
    assert bench.frames("") == []


@pytest.mark.parametrize(
    ("prompt", "outcome"),
    [
        ("nan", "numerical_error"),
        ("refuse", "invalid_prompt"),
        ("too long", "context_length_exceeded"),
    ],
)
def test_a_failure_after_dispatch_is_the_versions(
    bench: CopyBench, prompt: str, outcome: str
) -> None:
    bench.start_instant()
    bench.copy("r1", prompt)

    answer = bench.wait_for_answer("r1")

    assert (answer.outcome, answer.dropped) == (outcome, "")


def test_a_copy_that_runs_out_of_time_is_a_failure(bench: CopyBench) -> None:
    bench.start_instant(step_s=0.02)
    bench.copy("r1", max_tokens=1_000, deadline_s=0.2)

    answer = bench.wait_for_answer("r1")

    assert (answer.outcome, answer.dropped) == ("deadline_exceeded", "")


def test_a_copy_that_was_never_started_tells_nothing(
    bench: CopyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "COPY_WAIT_S", 0.0)
    bench.start_instant()
    bench.copy("r1")

    answer = bench.wait_for_answer("r1")

    assert (answer.outcome, answer.dropped) == ("dropped", "late")
    assert bench.queue.read_skips("chat", "") == {"golden": {"late": 1}}


def test_the_time_that_a_copy_waited_is_not_taken_from_its_run(bench: CopyBench) -> None:
    bench.copy("r1", max_tokens=5, deadline_s=0.3)
    time.sleep(0.4)
    bench.start_instant(step_s=0.01)

    assert bench.wait_for_answer("r1").outcome == "ok"


def test_an_answer_is_scored(bench: CopyBench) -> None:
    bench.start_instant()
    bench.copy("r1", score_text="one two three")

    answer = bench.wait_for_answer("r1")

    assert answer.outcome == "ok"
    assert answer.score == golden_score("one two three")


def test_copies_take_a_part_of_the_room_and_leave_the_rest(bench: CopyBench) -> None:
    engine = bench.start_instant(step_s=0.005)
    for number in range(12):
        bench.copy(f"c{number}", max_tokens=30)

    bench.wait_for_answer("c0")
    assert bench.redis.xpending(LANE.key("low"), "slots")["pending"] <= 4
    for number in range(12):
        bench.wait_for_answer(f"c{number}")

    assert max(len(batch) for batch in engine.batches) == 4


def test_requests_are_pulled_as_if_there_were_no_copies(bench: CopyBench) -> None:
    engine = bench.start_instant(step_s=0.01, max_requests=4)
    bench.copy("c", max_tokens=100)
    wait_until(lambda: engine.has_unfinished)
    for number in range(4):
        bench.send(f"r{number}", max_tokens=80)

    for number in range(4):
        bench.wait_for_last(f"r{number}")

    batches = [[name for name in batch if name.startswith("r")] for batch in engine.batches]
    assert max(len(batch) for batch in batches) == 4
    assert bench.wait_for_answer("c").text == golden_text(100)


def test_a_copy_that_made_way_too_often_is_dropped_and_counted(
    bench: CopyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "MAX_YIELDS", 0)
    engine = bench.start_instant(step_s=0.002)
    bench.copy("c", max_tokens=5_000)
    wait_until(lambda: engine.has_unfinished)
    bench.send("r", "slow", max_tokens=2)

    bench.wait_for_last("r")

    assert bench.wait_for_answer("c").dropped == "preempted"
    assert bench.queue.read_skips("chat", "") == {"golden": {"preempted": 1}}


def no_room(timeout_s: float) -> int:
    time.sleep(timeout_s)
    return 0


def test_no_copy_runs_beside_a_suspect_of_a_crash(
    bench: CopyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.start_instant(step_s=0.002)
    bench.copy("c", max_tokens=1_000)
    wait_until(lambda: engine.has_unfinished)
    monkeypatch.setattr(bench.loop, "wait_for_room", no_room)  # nothing new, only what is claimed
    time.sleep(0.05)
    bench.send("r", max_tokens=100)
    bench.deliver_in_vain(1)

    bench.wait_for_last("r")

    beside = [batch for batch in engine.batches if "r" in batch]
    assert len(beside) == 100
    assert all(batch == ["r"] for batch in beside)
    assert engine.batches.index(["c~golden"]) < engine.batches.index(["r"])


def test_what_the_route_does_not_ask_for_any_more_stops(bench: CopyBench) -> None:
    engine = bench.start_instant(step_s=0.01)
    bench.copy("c", max_tokens=100_000)
    wait_until(lambda: engine.has_unfinished)

    bench.roll_back(in_flight="finish")

    wait_until(lambda: not engine.has_unfinished)
    assert bench.answers() == {}
    assert bench.num_copies() == 0


def take_as_a_slot_that_dies(bench: CopyBench, name: str, *, is_idle: bool) -> None:
    bench.queue.renew(Lease("slot-2", name, 60_000), "{}", LANE, is_ready=True)
    taken, _ = bench.queue.take_copies(LANE, name, 8, is_idle=is_idle)
    assert taken
    bench.redis.delete(f"slot:{name}")


def test_a_copy_whose_slot_died_runs_again_when_nothing_else_does(bench: CopyBench) -> None:
    bench.copy("c1", max_tokens=20)
    bench.copy("c2", max_tokens=20)
    take_as_a_slot_that_dies(bench, "slot-2.a", is_idle=False)
    engine = bench.start_instant(step_s=0.005)

    assert {bench.wait_for_answer(name).outcome for name in ("c1", "c2")} == {"ok"}
    assert {len(batch) for batch in engine.batches} == {1}


def test_a_copy_that_killed_two_slots_is_a_failure_and_not_run_again(bench: CopyBench) -> None:
    bench.copy("c", "die")
    take_as_a_slot_that_dies(bench, "slot-2.a", is_idle=False)
    take_as_a_slot_that_dies(bench, "slot-2.b", is_idle=True)
    engine = bench.start_instant()

    answer = bench.wait_for_answer("c")

    assert (answer.outcome, answer.dropped) == ("request_crashed_engine", "")
    assert engine.batches == []
    assert bench.dead_letters() == []


def test_a_slot_that_leaves_drops_its_copies(bench: CopyBench) -> None:
    engine = bench.start_instant(step_s=0.01)
    bench.copy("c", max_tokens=100_000)
    wait_until(lambda: engine.has_unfinished)

    bench.stop()

    assert bench.answers()["c"].dropped == "shutdown"


def test_a_slot_that_lost_its_lease_writes_nothing(bench: CopyBench) -> None:
    engine = bench.start_instant(step_s=0.01)
    bench.copy("c", max_tokens=100_000)
    wait_until(lambda: engine.has_unfinished)
    assert bench.loop is not None
    old = bench.member.consumer

    bench.loop.rejoin()
    wait_until(lambda: bench.member.consumer != old and not engine.has_unfinished)

    assert bench.redis.xpending_range(LANE.key("low"), "slots", "-", "+", 9)[0]["consumer"] == old
    assert bench.answers() == {}
