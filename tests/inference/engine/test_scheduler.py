"""What each request gets of a step, who waits, and who gives way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from inference.engine.limits import SchedulerLimits
from inference.engine.plan import StepPlan
from inference.engine.request import Request, Status
from tests.inference.engine.echo_kv import EchoKV, dense_answer
from tests.inference.engine.small_scheduler import (
    EOS,
    LIMITS,
    add,
    make_crowded_scheduler,
    make_scheduler,
    shares,
    step,
)

# Shares of a step


def test_a_short_prompt_is_computed_in_one_step_and_then_decodes_one_token_a_step() -> None:
    scheduler, _ = make_scheduler()
    request = add(scheduler, "a", prompt=5)

    assert step(scheduler, a=11) == {"a": (0, 5, True)}
    assert step(scheduler, a=12) == {"a": (5, 1, True)}
    assert request.tokens[5:] == [11, 12]


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_in_the_last() -> None:
    scheduler, _ = make_scheduler()
    request = add(scheduler, "a", prompt=20)

    chunks = [step(scheduler)["a"] for _ in range(3)]

    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]
    assert request.num_output_tokens == 1


def test_decoding_requests_come_before_the_rest_of_an_older_prompt() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", prompt=20)
    add(scheduler, "b")
    assert list(step(scheduler)) == ["a", "b"]

    assert list(step(scheduler).items()) == [("b", (1, 1, True)), ("a", (8, 8, False))]


def test_a_long_prompt_leaves_room_in_the_step_for_a_short_one() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", prompt=60)
    add(scheduler, "b", prompt=6)

    assert step(scheduler) == {"a": (0, 8, False), "b": (0, 6, True)}


def test_the_budget_ends_a_step_and_the_request_that_got_nothing_is_not_admitted() -> None:
    scheduler, _ = make_scheduler()
    for request_id in "abc":
        add(scheduler, request_id, prompt=8)

    assert step(scheduler) == {"a": (0, 8, True), "b": (0, 8, True)}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_prompt_advances_even_when_all_other_places_decode() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=4)
    scheduler, _ = make_scheduler(limits)
    for request_id in "abc":
        add(scheduler, request_id)
    step(scheduler)
    add(scheduler, "d", prompt=9)

    assert step(scheduler)["d"] == (0, 1, False)
    assert step(scheduler)["d"] == (1, 1, False)


def test_no_more_than_max_num_seqs_run_and_the_next_comes_when_one_ends() -> None:
    scheduler, _ = make_scheduler()
    for request_id in "abcde":
        add(scheduler, request_id)
    assert list(step(scheduler)) == ["a", "b", "c", "d"]

    step(scheduler, b=EOS)

    assert list(step(scheduler)) == ["a", "c", "d", "e"]


def test_a_plan_without_requests_is_empty() -> None:
    scheduler, _ = make_scheduler()

    assert scheduler.plan() == StepPlan(())


def test_a_plan_knows_its_tokens() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", prompt=5)
    add(scheduler, "b", prompt=3)

    assert scheduler.plan().num_tokens == 8


# Blocks, admission and preemption


def test_a_request_holds_blocks_for_all_its_tokens_from_its_first_step() -> None:
    scheduler, pool = make_scheduler()
    request = add(scheduler, "a", prompt=20)
    assert request.block_table == []

    scheduler.plan()

    assert len(request.block_table) == 5
    assert pool.num_held == 5


def test_a_head_that_does_not_fit_blocks_those_behind_it() -> None:
    scheduler, _ = make_scheduler(num_blocks=8)
    add(scheduler, "a", prompt=8)
    add(scheduler, "b", prompt=20)
    add(scheduler, "c", prompt=1)

    assert list(step(scheduler)) == ["a"]
    assert scheduler.num_waiting == 2


def test_admission_leaves_a_free_block_for_everyone_who_runs() -> None:
    scheduler, pool = make_scheduler(num_blocks=6)
    add(scheduler, "a", prompt=4)
    add(scheduler, "b", prompt=12)

    assert list(step(scheduler)) == ["a"]
    assert pool.num_free == 4, "b would have left one block for the two of them"


def test_a_request_alone_may_take_the_whole_pool() -> None:
    scheduler, pool = make_scheduler(num_blocks=5)
    add(scheduler, "a", prompt=15, max_tokens=1)

    scheduler.plan()

    assert pool.num_free == 0


def test_when_blocks_run_out_the_youngest_gives_way_with_all_its_tokens() -> None:
    scheduler, pool, (oldest, middle, youngest) = make_crowded_scheduler()
    tokens = list(youngest.tokens)

    plan = scheduler.plan()

    assert list(shares(plan)) == ["a", "b"]
    assert youngest.status is Status.PREEMPTED
    assert youngest.tokens == tokens
    assert (youngest.block_table, youngest.num_computed_tokens) == ([], 0)
    assert pool.num_held == len(oldest.block_table) + len(middle.block_table)
    assert scheduler.num_preemptions == youngest.num_preemptions == 1
    assert oldest.num_preemptions == middle.num_preemptions == 0
    scheduler.check_integrity()


def test_whoever_needs_a_block_and_is_itself_the_youngest_gives_way() -> None:
    scheduler, _, (oldest, middle, youngest) = make_crowded_scheduler()
    step(scheduler)
    step(scheduler)

    assert list(step(scheduler)) == ["a"]
    assert middle.num_preemptions == youngest.num_preemptions == 1
    assert oldest.num_preemptions == 0


def test_the_preempted_resume_in_arrival_order_before_those_that_came_later() -> None:
    scheduler, _, (_, middle, youngest) = make_crowded_scheduler()
    add(scheduler, "d")
    for _ in range(3):
        step(scheduler)
    num_tokens = len(middle.tokens)

    step(scheduler, a=EOS)
    order = []
    for _ in range(4):
        order += [request_id for request_id in step(scheduler) if request_id not in order]
        step(scheduler, **dict.fromkeys(order[-1:], EOS))

    assert order == ["b", "c", "d"]
    assert len(middle.tokens) > num_tokens
    assert youngest.num_preemptions == 1


def test_a_resumed_request_computes_prompt_and_output_again_in_chunks() -> None:
    scheduler, _, (_, _, youngest) = make_crowded_scheduler()
    step(scheduler)
    assert (youngest.status, len(youngest.tokens)) == (Status.PREEMPTED, 5)

    step(scheduler, a=EOS, b=EOS)

    assert step(scheduler) == {"c": (0, 5, True)}
    assert youngest.num_output_tokens == 4


@pytest.mark.parametrize("long_prefill_tokens", [1, 3, 16])
@pytest.mark.parametrize("num_blocks", [9, 13, 200])
def test_an_answer_is_the_same_in_a_crowd_as_alone_with_a_huge_pool(
    num_blocks: int, long_prefill_tokens: int
) -> None:
    limits = replace(LIMITS, long_prefill_tokens=long_prefill_tokens, max_model_len=32)
    crowd = run_to_the_end(limits, num_blocks=num_blocks, lengths={"a": 9, "b": 3, "c": 14, "d": 1})

    for request in crowd:
        prompt = request.tokens[: request.num_prompt_tokens]
        (alone,) = run_to_the_end(
            LIMITS, num_blocks=1000, lengths={request.id: request.num_prompt_tokens}
        )
        assert request.tokens == alone.tokens
        assert request.tokens == dense_answer(
            prompt, seed=ord(request.id), max_tokens=15, stops_at={EOS}
        )
    assert any(request.num_preemptions for request in crowd) == (num_blocks < 200)


def run_to_the_end(
    limits: SchedulerLimits, *, num_blocks: int, lengths: Mapping[str, int]
) -> list[Request]:
    scheduler, pool = make_scheduler(limits, num_blocks=num_blocks)
    kv = EchoKV(pool)
    requests = [
        add(scheduler, name, prompt=length, max_tokens=15) for name, length in lengths.items()
    ]
    while scheduler.num_unfinished:
        plan = scheduler.plan()
        scheduler.commit(plan, kv.run(plan))
    return requests
