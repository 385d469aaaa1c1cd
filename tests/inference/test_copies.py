"""Copies of requests in Redis: when they are made, who is given them, and that no request notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from inference.protocol import Answer, GenerateRequest, SamplingParams
from inference.queue import FinishedCopy, Lane, TakenCopy
from tests.inference.lane_bench import LaneBench, route

LIVE, CANDIDATE = Lane("chat", "small/1"), Lane("chat", "small/2")
ROLLOUT = route("small/1", 1, candidate="small/2", rollout="r1", salt="s", shadow_bp=10_000)


@pytest.fixture
def bench(redis_url: str) -> Iterator[LaneBench]:
    """Every live request is shadowed, and a slot of each version is ready."""
    with LaneBench(redis_url) as bench:
        bench.queue.apply_route(ROLLOUT)
        bench.join(LIVE, "slot-live.a")
        bench.join(CANDIDATE, "slot-candidate.a")
        yield bench


def take(
    bench: LaneBench,
    lane: Lane = CANDIDATE,
    consumer: str = "slot-candidate.a",
    count: int = 100,
    *,
    held: Sequence[TakenCopy] = (),
    is_idle: bool = False,
) -> tuple[list[TakenCopy], set[str]]:
    ids = [each.delivery.entry_id for each in held]
    return bench.queue.take_copies(lane, consumer, count, held=ids, is_idle=is_idle)


def copies(bench: LaneBench, lane: Lane = CANDIDATE) -> list[str]:
    return [fields["id"] for _, fields in bench.redis.xrange(lane.key("low"))]


def half(taken: TakenCopy, **fields: Any) -> FinishedCopy:
    entry = taken.delivery.entry
    request_id = entry.id.partition("~")[0]
    answer = Answer(request_id, entry.arm, "chat", "small/2", 1, entry.rollout, "fp", "ok", 1.0)
    return FinishedCopy(taken.delivery, replace(answer, **fields))


def halves(bench: LaneBench) -> list[Answer]:
    return [each.answer for each in bench.queue.read_answers()]


def test_a_copy_goes_to_the_candidate_and_its_request_where_it_always_went(
    bench: LaneBench,
) -> None:
    placement = bench.enqueue("r0")

    assert (placement.version, placement.arm) == ("small/1", "live")
    assert (placement.rollout, placement.kept_for) == ("r1", ("shadow",))
    assert (bench.ids(LIVE), bench.ids(CANDIDATE)) == (["r0"], [])
    (taken,), _ = take(bench)
    entry = taken.delivery.entry
    assert (entry.id, entry.gateway, entry.arm, entry.rollout) == ("r0~shadow", "", "shadow", "r1")
    assert entry.deadline_ms - entry.arrival_ms == 60_000
    assert taken.body is not None
    assert GenerateRequest.from_json(taken.body).prompt == "Hello"


def test_a_request_without_a_rollout_is_kept_for_nobody(bench: LaneBench) -> None:
    bench.queue.apply_route(route("small/1", 2))

    assert bench.enqueue("r0").kept_for == ()
    assert copies(bench) == []


def test_a_share_of_requests_is_copied_by_the_request_and_the_rollout(bench: LaneBench) -> None:
    chosen: dict[str, dict[str, set[int]]] = {}
    for generation, rollout in ((2, "one"), (3, "two")):
        changed = replace(ROLLOUT, generation=generation, rollout=rollout)
        bench.queue.apply_route(replace(changed, shadow_bp=2_000, score_bp=5_000))
        chosen[rollout] = {"shadow": set(), "score": set()}
        for number in range(200):
            for arm in bench.enqueue(f"n{number}").kept_for:
                chosen[rollout][arm].add(number)
            bench.redis.delete(LIVE.key("q"), CANDIDATE.key("low"))

    assert 20 <= len(chosen["one"]["shadow"]) <= 60
    assert 75 <= len(chosen["one"]["score"]) <= 125
    assert chosen["one"]["shadow"] != chosen["two"]["shadow"]
    assert not chosen["one"]["shadow"] <= chosen["one"]["score"]


def test_who_answers_as_the_candidate_is_not_copied(bench: LaneBench) -> None:
    bench.queue.apply_route(replace(ROLLOUT, generation=2, canary_bp=10_000))

    placement = bench.enqueue("r0")

    assert (placement.arm, placement.kept_for) == ("candidate", ())


def test_the_live_version_answers_a_second_time(bench: LaneBench) -> None:
    bench.queue.apply_route(replace(ROLLOUT, generation=2, shadow_bp=0, self_bp=10_000))

    assert bench.enqueue("r0").kept_for == ("self",)
    assert (copies(bench), copies(bench, LIVE)) == ([], ["r0~self"])


def test_an_answer_to_be_scored_is_kept_and_copied_later(bench: LaneBench) -> None:
    bench.queue.apply_route(replace(ROLLOUT, generation=2, shadow_bp=0, score_bp=10_000))

    assert bench.enqueue("r0").kept_for == ("score",)
    assert copies(bench) == []


def test_what_is_not_copied_is_counted_by_its_reason(bench: LaneBench) -> None:
    for number in range(33):
        bench.enqueue(f"full{number}")
        bench.pull(LIVE, "slot-live.a")
    bench.redis.delete(CANDIDATE.key("low"))
    for number in range(10):
        bench.enqueue(f"busy{number}")
    bench.pull(LIVE, "slot-live.a")
    bench.redis.delete(CANDIDATE.key("ready"))

    assert bench.enqueue("r0").kept_for == ()

    assert bench.queue.read_skips("chat", "r1") == {
        "shadow": {"full": 1, "busy": 1, "not_ready": 1}
    }
    assert bench.queue.read_skips("chat", "another") == {}


def test_no_copy_is_given_out_while_a_request_waits(bench: LaneBench) -> None:
    bench.queue.apply_route(replace(ROLLOUT, generation=2, self_bp=10_000))
    bench.enqueue("r0")

    assert take(bench, LIVE, "slot-live.a") == ([], set())
    (delivery,) = bench.pull(LIVE, "slot-live.a")
    assert delivery.entry.id == "r0"
    (taken,), _ = take(bench, LIVE, "slot-live.a")
    assert taken.delivery.entry.id == "r0~self"


def test_no_more_are_given_out_than_there_is_room_for(bench: LaneBench) -> None:
    for number in range(5):
        bench.enqueue(f"r{number}")

    assert len(take(bench, count=2)[0]) == 2
    assert take(bench, count=0)[0] == []


def test_a_half_is_written_once_and_by_whoever_owns_the_copy(bench: LaneBench) -> None:
    bench.enqueue("r0")
    (taken,), _ = take(bench)
    answer = half(taken, text="hi", finish_reason="stop")

    assert bench.queue.answer_copies(CANDIDATE, "slot-other.a", [answer]) == 0
    assert bench.queue.answer_copies(CANDIDATE, "slot-candidate.a", [answer]) == 1
    assert bench.queue.answer_copies(CANDIDATE, "slot-candidate.a", [answer]) == 0

    assert halves(bench) == [answer.answer]
    assert copies(bench) == []
    assert bench.redis.exists("req:r0~shadow") == 0
    assert 0 < bench.redis.ttl("answers") <= 900


def test_what_a_slot_drops_is_counted(bench: LaneBench) -> None:
    bench.enqueue("r0")
    (taken,), _ = take(bench)

    dropped = half(taken, outcome="dropped", dropped="late")
    bench.queue.answer_copies(CANDIDATE, "slot-candidate.a", [dropped])

    assert bench.queue.read_skips("chat", "r1") == {"shadow": {"late": 1}}


def test_a_copy_of_a_slot_that_died_is_given_alone_to_one_with_nothing_else_to_do(
    bench: LaneBench,
) -> None:
    for number in range(3):
        bench.enqueue(f"r{number}")
    assert len(take(bench, count=2)[0]) == 2
    bench.crash("slot-candidate.a")
    bench.join(CANDIDATE, "slot-candidate.b")

    busy, _ = take(bench, consumer="slot-candidate.b", is_idle=False, count=1)
    idle, _ = take(bench, consumer="slot-candidate.b", is_idle=True)

    assert [each.delivery.entry.id for each in busy] == ["r2~shadow"]
    assert [(each.delivery.entry.id, each.delivery.attempt) for each in idle] == [("r0~shadow", 2)]


def test_nobody_takes_over_from_a_slot_that_lives(bench: LaneBench) -> None:
    bench.enqueue("r0")
    take(bench)
    bench.join(CANDIDATE, "slot-other.a")

    assert take(bench, consumer="slot-other.a", is_idle=True) == ([], set())


def test_a_slot_that_wakes_up_cannot_end_what_another_has_taken_over(bench: LaneBench) -> None:
    bench.enqueue("r0")
    (lost,), _ = take(bench)
    bench.crash("slot-candidate.a")
    bench.join(CANDIDATE, "slot-candidate.b")
    (taken,), _ = take(bench, consumer="slot-candidate.b", is_idle=True)

    assert bench.queue.answer_copies(CANDIDATE, "slot-candidate.a", [half(lost)]) == 0
    assert take(bench, held=[lost])[1] == {lost.delivery.entry_id}
    assert take(bench, consumer="slot-candidate.b", held=[taken])[1] == set()


@pytest.mark.parametrize(
    "changed",
    [
        replace(ROLLOUT, generation=2, candidate="", rollout="", shadow_bp=0),
        replace(ROLLOUT, generation=2, live="small/2", candidate="", rollout="", shadow_bp=0),
        replace(ROLLOUT, generation=2, candidate="small/3"),
        replace(ROLLOUT, generation=2, rollout="r2"),
    ],
    ids=["rolled back", "promoted", "another candidate", "another rollout"],
)
def test_a_change_of_route_drops_copies_and_moves_none(bench: LaneBench, changed: Any) -> None:
    for number in range(4):
        bench.enqueue(f"r{number}")
    running, _ = take(bench, count=2)

    bench.queue.apply_route(changed)

    assert copies(bench) == []
    assert sorted(bench.redis.keys("req:*~*")) == []
    assert take(bench, held=running)[1] == {each.delivery.entry_id for each in running}
    assert bench.queue.read_skips("chat", "r1") == {"shadow": {"route_changed": 4}}
    assert [each.entry.id for each in bench.standing()] == ["r0", "r1", "r2", "r3"]


def test_a_pause_keeps_copies_that_were_made(bench: LaneBench) -> None:
    bench.enqueue("r0")
    bench.queue.apply_route(replace(ROLLOUT, generation=2, shadow_bp=0))

    assert copies(bench) == ["r0~shadow"]


def test_no_rescue_claim_or_return_brings_a_copy_to_a_live_lane(bench: LaneBench) -> None:
    bench.enqueue("r0")
    (taken,), _ = take(bench)
    bench.crash("slot-candidate.a")

    bench.queue.rescue(LIVE, "slot-live", "fp")
    assert bench.claim(CANDIDATE, bench.join(CANDIDATE, "slot-candidate.b")) == []
    bench.queue.send(CANDIDATE, "slot-candidate.a", {}, returned=[taken.delivery])

    assert [each.entry.id for each in bench.standing()] == ["r0"]
    assert copies(bench) == ["r0~shadow"]


def score_request(request_id: str = "r0") -> GenerateRequest:
    sampling = SamplingParams()
    return GenerateRequest(request_id, "chat", sampling, 60.0, prompt="Hello", score_text="Hi!")


def test_an_answer_is_given_to_be_scored_once(bench: LaneBench) -> None:
    replies = [
        bench.queue.enqueue_copy(score_request(), "small/2", arm="score", rollout="r1")
        for _ in range(2)
    ]

    assert replies == ["queued", "repeated"]
    (taken,), _ = take(bench)
    assert taken.delivery.entry.id == "r0~score"
    assert taken.body is not None
    assert GenerateRequest.from_json(taken.body).score_text == "Hi!"
    bench.queue.answer_copies(CANDIDATE, "slot-candidate.a", [half(taken)])
    assert bench.queue.enqueue_copy(score_request(), "small/2", arm="score", rollout="r1") == (
        "repeated"
    )


@pytest.mark.parametrize(
    ("version", "arm", "rollout", "reply"),
    [
        ("small/3", "score", "r1", "route_changed"),
        ("small/2", "score", "old", "route_changed"),
        ("small/2", "golden", "", "queued"),
        ("small/1", "golden", "", "queued"),
    ],
)
def test_a_copy_is_placed_only_if_the_route_asks_for_it(
    bench: LaneBench, version: str, arm: str, rollout: str, reply: str
) -> None:
    assert bench.queue.enqueue_copy(score_request(), version, arm=arm, rollout=rollout) == reply


def test_giving_up_tells_how_far_a_copy_came(bench: LaneBench) -> None:
    bench.enqueue("r0")
    bench.enqueue("r1")
    take(bench, count=1)

    found = [bench.queue.give_up_copy(name, "shadow") for name in ("r0", "r1", "r1", "never")]

    assert found == ["dispatched", "waiting", "gone", "gone"]
    assert copies(bench) == []


def test_old_and_unreadable_halves_are_deleted(bench: LaneBench) -> None:
    bench.redis.xadd("answers", {"answer": "{}"}, id="1-1")
    bench.redis.xadd("answers", {"answer": "no json"})

    assert halves(bench) == []
    assert bench.redis.xlen("answers") == 0
