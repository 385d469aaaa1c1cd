"""From stored rows to counts: each row once, whatever is read twice, crashes, or comes in another order."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

from controlplane.monitoring.models import RequestLog
from controlplane.rollouts import evidence
from controlplane.rollouts.evidence import collect
from controlplane.rollouts.models import Rollout, SegmentCount, Step
from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.policy import Policy, parse_policy
from drift.eprocess import DIFFERENCE
from inference.queue import Queue
from tests.controlplane.rollouts.world import DEADLINE_S, DOCUMENT, World, make_pair

pytestmark = pytest.mark.django_db
ZERO, WORSE = str(DIFFERENCE.num_cells // 2), str(DIFFERENCE.num_cells - 1)
CANARY = {
    **DOCUMENT,
    "steps": [{"type": "canary", "bp": 1000, "floor": 5, "for_s": 0}],
}


@pytest.fixture
def world(queue: Queue) -> World:
    return World(queue)


def begin(world: World, document: dict[str, Any] | None = None) -> Policy:
    world.start(document)
    world.hold("tiny/2")
    return parse_policy(world.tick().document)


def gather(world: World, policy: Policy) -> bool:
    return collect(rollout=world.rollout, policy=policy, now=world.now)


def counted(metric: str = "failure_rate", segment: str = "[]") -> SegmentCount:
    return SegmentCount.objects.get(metric=metric, segment=segment)


def all_counts() -> list[tuple[Any, ...]]:
    names = (
        "metric", "segment", "counts", "matched", "num_intended", "num_dropped", "num_incumbent",
        "num_candidate", "sum_incumbent", "sum_candidate",
    )  # fmt: skip
    return [
        tuple(map(str, row))
        for row in SegmentCount.objects.order_by("metric", "segment").values_list(*names)
    ]


def test_pairs_become_cells_and_arms(world: World) -> None:
    policy = begin(world)
    world.pairs(30)
    world.pairs(4, failing=1.0)
    world.settle()
    assert gather(world, policy)
    row = counted()
    assert row.counts == {ZERO: 30, WORSE: 4}
    assert (row.num_incumbent, row.num_candidate, row.sum_candidate) == (34, 34, 4.0)
    assert (row.num_intended, row.num_dropped) == (34, 0)
    assert Step.objects.get(rollout=world.rollout, index=0).counts == {"[]": 34}


def test_what_was_counted_once_is_not_counted_again(world: World) -> None:
    policy = begin(world)
    world.pairs(30)
    world.settle()
    stale = world.rollout
    assert gather(world, policy)
    before = all_counts()
    assert not gather(world, policy)
    assert not collect(rollout=stale, policy=policy, now=world.now)
    world.wait(3600)
    gather(world, policy)
    assert all_counts() == before


def test_nothing_is_counted_before_everything_of_its_time_must_have_ended(world: World) -> None:
    policy = begin(world)
    world.pairs(30)
    world.wait(DEADLINE_S + evidence.LAG_S - 1)
    gather(world, policy)
    assert not SegmentCount.objects.exists()
    world.wait(DOCUMENT["block_s"] + 1)
    assert gather(world, policy)
    assert counted().counts == {ZERO: 30}


def test_a_crash_between_any_two_rows_counts_nothing_and_the_next_call_everything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = begin(world)
    world.pairs(30)
    world.settle()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(evidence, "_add", crash)
        with pytest.raises(KeyboardInterrupt):
            gather(world, policy)
    assert gather(world, policy)
    assert counted().counts == {ZERO: 30}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_rows_and_the_pieces_in_which_they_are_counted_mean_nothing(
    world: World, seed: int
) -> None:
    policy = begin(world, {**CANARY, "traffic": [{"segment": {"lang": "hi"}, "per_hour": 9e9}]})
    chance = random.Random(5)  # noqa: S311
    rows, pairs = [], []
    for number in range(300):
        at = world.now + timedelta(seconds=chance.uniform(0, 50))
        fields: dict[str, Any] = {
            "arm": chance.choice(["live", "live", "candidate"]),
            "user": f"u{chance.randrange(90)}",
            "finished_at": at + timedelta(seconds=chance.uniform(0.1, 9)),
            "tags": {"lang": chance.choice(["hi", "en"])},
            "outcome": chance.choice(["ok", "ok", "ok", "engine_failed", "cancelled"]),
        }
        rows.append(make_row(world, number, **fields))
        pairs.append(
            make_pair(world.key, "shadow", at, has_failed=chance.random() < 0.2,
                      prompt_digest=f"d{chance.randrange(200)}", segments={"lang": "hi"},
                      request_id=f"p{number}")
        )  # fmt: skip

    def count(*, in_pieces: bool) -> list[tuple[Any, ...]]:
        SegmentCount.objects.all().delete()
        Rollout.objects.filter(pk=world.rollout.pk).update(sealed_block=start, arms={})
        now = world.now
        for _ in range(30 if in_pieces else 0):
            now += timedelta(seconds=7)
            collect(rollout=world.rollout, policy=policy, now=now)
        while collect(rollout=world.rollout, policy=policy, now=world.now + timedelta(hours=1)):
            pass
        return all_counts()

    start = world.rollout.sealed_block
    RequestLog.objects.bulk_create(rows)
    Pair.objects.bulk_create(pairs)
    straight = count(in_pieces=False)
    assert count(in_pieces=True) == straight
    RequestLog.objects.all().delete()
    Pair.objects.all().delete()
    shuffle = random.Random(seed).shuffle  # noqa: S311
    for each in (rows, pairs):
        shuffle(each)
        for row in each:
            row.pk = None
    RequestLog.objects.bulk_create(rows)
    Pair.objects.bulk_create(pairs)
    assert count(in_pieces=False) == straight
    assert sum(counted().counts.values()) > 100


def make_row(world: World, number: int, **fields: Any) -> RequestLog:
    values: dict[str, Any] = {
        "request_id": f"x{number}", "endpoint": "chat", "generation": world.endpoint.generation,
        "version": "tiny/2" if fields.get("arm") == "candidate" else "tiny/1", "outcome": "ok",
        "status": 200, "streamed": False, "prompt_tokens": 5, "completion_tokens": 5, "total_s": 0.1,
        "finished_at": world.now,
    }  # fmt: skip
    return RequestLog(**values | fields)


def test_a_copy_that_was_never_run_lowers_coverage_and_is_no_failure(world: World) -> None:
    policy = begin(world)
    world.pairs(30)
    world.pairs(10, state="unobserved", candidate_outcome="", reason="displaced")
    world.settle()
    gather(world, policy)
    row = counted()
    assert (row.num_intended, row.num_dropped, row.counts) == (40, 10, {ZERO: 30})


def test_a_prompt_and_a_user_speak_once_also_over_pieces_of_time(world: World) -> None:
    policy = begin(world, CANARY)
    for _ in range(2):
        world.pairs(5, prompt_digest="same")
        world.requests(20)
        world.requests(3, arm="candidate", user="ann")
        world.settle()
        gather(world, policy)
    row = counted()
    assert row.counts == {ZERO: 2}  # one pair, and ann's first request
    assert world.rollout.arms == {"1000": [0, 1]}


def test_a_candidates_request_that_another_version_had_to_answer_is_a_failure(world: World) -> None:
    policy = begin(world, CANARY)
    world.requests(20)
    world.requests(2, arm="candidate", version="tiny/1")
    world.requests(2, arm="candidate", outcome="cancelled", status=499)
    world.settle()
    gather(world, policy)
    assert counted().sum_candidate == 2.0


def test_requests_count_only_while_the_candidate_has_a_share(world: World) -> None:
    policy = begin(world)
    world.requests(50)
    world.settle()
    gather(world, policy)
    assert not SegmentCount.objects.exists()


def test_flags_of_a_canary_are_unknown_and_its_failures_are_not(world: World) -> None:
    document = {
        **CANARY,
        "metrics": {**DOCUMENT["metrics"], "flag_rate": {"kind": "flags", "modes": ["shadow"]}},
        "steps": [{"type": "shadow", "share": 0.1, "until": "floor", "floor": 1},
                  *CANARY["steps"]],
    }  # fmt: skip
    begin(world, document)
    world.pairs(8, candidate_flags=["refusal"])
    world.settle()
    policy = parse_policy(world.tick().document)
    world.requests(40)
    world.requests(10, arm="candidate")
    world.settle()
    gather(world, policy)
    assert counted("flag_rate").counts == {WORSE: 8}
    assert sum(counted("failure_rate").counts.values()) == 18


def test_an_answer_that_was_only_scored_feeds_the_gates_of_the_cheap_shadow_alone(
    world: World,
) -> None:
    document = {
        **DOCUMENT,
        "metrics": {
            **DOCUMENT["metrics"],
            "disagreement": {
                "kind": "score", "field": "disagreement", "modes": ["score"], "tolerance": 0.2,
                "margin": 0.4,
                "overall_margin": 0.4,
            },
        },
        "steps": [{"type": "score", "share": 0.5, "floor": 5}, *DOCUMENT["steps"]],
    }  # fmt: skip
    policy = begin(world, document)
    assert world.endpoint.score_bp == 5000
    world.pairs(12, arm="score", agreement=0.9)
    world.settle()
    gather(world, policy)
    assert SegmentCount.objects.filter(metric="failure_rate").count() == 0
    row = counted("disagreement")
    assert (row.num_candidate, round(row.sum_candidate, 6)) == (12, 1.2)
    assert Step.objects.get(rollout=world.rollout, index=0).counts == {"[]": 12}


def test_cost_is_compared_per_thousand_tokens(world: World) -> None:
    document = {
        **CANARY,
        "metrics": {
            **DOCUMENT["metrics"],
            "cost": {"kind": "cost", "field": "engine_s_per_1k", "modes": ["canary"]},
        },
    }
    policy = begin(world, document)
    world.requests(20, engine_s=0.02)
    world.requests(5, arm="candidate", engine_s=0.06)
    world.settle()
    gather(world, policy)
    row = counted("cost")
    # (3 - 1) / (3 + 1) = one half
    middle = DIFFERENCE.num_cells // 2 + DIFFERENCE.num_steps // 2
    assert row.counts == {str(middle): 5}


def test_a_tail_is_held_to_the_limit_of_the_time_before(world: World) -> None:
    document = {**CANARY, "metrics": {**DOCUMENT["metrics"], "p99": {"kind": "latency"}}}
    world.requests(400, finished_at=world.now - timedelta(hours=1))
    policy = begin(world, document)
    assert world.rollout.limits == [
        ["p99", "[]", pytest.approx(120.0), 0.99, pytest.approx(100.0), 400]
    ]
    world.requests(20)
    world.requests(5, arm="candidate", total_s=0.119)
    world.requests(3, arm="candidate", total_s=0.121)
    world.settle()
    gather(world, policy)
    assert counted("p99").counts == {"0": 5, "2": 3}
    assert counted("p99").matched == {ZERO: 5, WORSE: 3}


def test_a_limit_that_could_not_be_fixed_at_the_start_is_fixed_once_there_are_requests(
    world: World,
) -> None:
    begin(
        world,
        {
            **CANARY,
            "metrics": {
                **DOCUMENT["metrics"],
                "p99": {"kind": "latency"},
                "slow": {"kind": "latency", "limit_ms": 900},
            },
        },
    )
    world.requests(20)
    world.requests(3, arm="candidate")
    world.settle()
    assert [each[0] for each in world.tick().limits] == ["slow"]
    assert "too few requests to fix a limit" in str(world.rollout.looks.get().results)
    world.requests(400)
    world.settle()
    limits = world.tick().limits
    assert [each[:2] for each in limits] == [["slow", "[]"], ["p99", "[]"]]
    world.requests(500, total_s=5.0)
    world.settle()
    assert world.tick().limits == limits
