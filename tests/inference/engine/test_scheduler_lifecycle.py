"""Which requests are accepted, and how each accepted one ends."""

from __future__ import annotations

import pytest

from inference.config import InvalidConfig
from inference.engine.limits import SchedulerLimits
from inference.engine.request import Request, RequestRefused, Status
from inference.engine.scheduler import Scheduler
from inference.protocol import FinishReason, SamplingParams
from tests.inference.engine.small_scheduler import (
    EOS,
    add,
    commit,
    make_crowded_scheduler,
    make_scheduler,
    shares,
    step,
)

# Ends


def test_an_end_of_sequence_token_ends_the_answer_and_belongs_to_it() -> None:
    scheduler, pool = make_scheduler()
    request = add(scheduler, "a", prompt=5)
    step(scheduler, a=11)

    step(scheduler, a=EOS)

    assert request.tokens[5:] == [11, EOS]
    assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.STOP)
    assert request.block_table == []
    assert (pool.num_held, scheduler.num_unfinished) == (0, 0)


def test_a_request_that_ignores_the_end_of_sequence_goes_on() -> None:
    scheduler, _ = make_scheduler()
    request = Request.from_prompt("a", (5,), SamplingParams(ignore_eos=True, max_tokens=2))
    scheduler.add(request)

    step(scheduler, a=EOS)
    assert not request.is_finished

    step(scheduler, a=EOS)
    assert request.finish_reason is FinishReason.LENGTH


def test_max_tokens_ends_the_answer() -> None:
    scheduler, _ = make_scheduler()
    request = add(scheduler, "a", prompt=5, max_tokens=2)

    step(scheduler)
    assert not request.is_finished

    step(scheduler)
    assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.LENGTH)


def test_an_end_of_sequence_as_the_last_allowed_token_counts_as_a_stop() -> None:
    scheduler, _ = make_scheduler()
    request = add(scheduler, "a", max_tokens=1)

    step(scheduler, a=EOS)

    assert request.finish_reason is FinishReason.STOP


def test_a_request_without_max_tokens_fills_the_context() -> None:
    scheduler, _ = make_scheduler()
    request = add(scheduler, "a", prompt=5)

    while scheduler.num_unfinished:
        step(scheduler)

    assert len(request.tokens) == 64
    assert request.finish_reason is FinishReason.LENGTH


def test_a_commit_names_the_requests_that_gained_a_token() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", prompt=20)
    second, third = add(scheduler, "b", prompt=2), add(scheduler, "c", prompt=3)

    assert commit(scheduler, scheduler.plan(), c=EOS) == [second, third]
    assert third.is_finished


def test_a_stop_string_ends_a_request_from_outside() -> None:
    scheduler, pool = make_scheduler()
    request = add(scheduler, "a", prompt=5)
    step(scheduler)

    assert scheduler.finish("a", FinishReason.STOP)

    assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.STOP)
    assert pool.num_held == 0
    assert not scheduler.finish("a", FinishReason.STOP)


# Aborts and lost steps


@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["waiting", "mid-prefill", "decoding"])
def test_an_aborted_request_holds_nothing_and_says_so_once(num_steps: int) -> None:
    scheduler, pool = make_scheduler()
    request = add(scheduler, "a", prompt=20)
    for _ in range(num_steps):
        step(scheduler)

    assert scheduler.abort("a")

    assert (request.status, request.finish_reason) == (Status.ABORTED, None)
    assert (request.block_table, pool.num_held, scheduler.num_unfinished) == ([], 0, 0)
    assert "a" not in scheduler
    assert not scheduler.abort("a")
    scheduler.check_integrity()


def test_a_preempted_request_can_be_aborted() -> None:
    scheduler, _, (_, _, youngest) = make_crowded_scheduler()
    step(scheduler)
    assert youngest.num_preemptions == 1

    assert scheduler.abort("c")

    assert youngest.status is Status.ABORTED
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)


def test_results_of_a_request_that_was_aborted_meanwhile_are_dropped() -> None:
    scheduler, pool = make_scheduler()
    aborted, other = add(scheduler, "a", prompt=5), add(scheduler, "b", prompt=5)
    plan = scheduler.plan()

    scheduler.abort("a")

    assert commit(scheduler, plan) == [other]
    assert (aborted.num_output_tokens, other.num_output_tokens) == (0, 1)
    assert pool.num_held == len(other.block_table)


def test_results_of_an_aborted_request_never_reach_a_new_one_of_the_same_id() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", prompt=5)
    plan = scheduler.plan()
    scheduler.abort("a")
    successor = add(scheduler, "a", prompt=3)

    assert commit(scheduler, plan) == []
    assert step(scheduler) == {"a": (0, 3, True)}
    assert successor.num_output_tokens == 1


def test_aborting_an_unknown_request_does_nothing() -> None:
    scheduler, _ = make_scheduler()

    assert not scheduler.abort("nobody")


def test_a_step_whose_results_are_lost_is_planned_again() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", prompt=20)
    step(scheduler)

    lost = scheduler.plan()

    assert shares(scheduler.plan()) == shares(lost) == {"a": (8, 8, False)}


def test_committing_a_plan_twice_is_refused() -> None:
    scheduler, _ = make_scheduler()
    request = add(scheduler, "a", prompt=5)
    plan = scheduler.plan()
    commit(scheduler, plan)

    with pytest.raises(ValueError, match="computed up to 5, the plan starts at 0"):
        commit(scheduler, plan)

    assert request.num_output_tokens == 1


def test_a_commit_that_lacks_a_token_changes_nothing() -> None:
    scheduler, _ = make_scheduler()
    first, second = add(scheduler, "a", prompt=5), add(scheduler, "b", prompt=5)
    plan = scheduler.plan()

    with pytest.raises(ValueError, match="Request b has no token"):
        scheduler.commit(plan, {"a": 7})

    assert first.num_computed_tokens == second.num_computed_tokens == 0


# What is accepted


def refusal_of(scheduler: Scheduler, request: Request) -> tuple[str, int, str | None, str]:
    with pytest.raises(RequestRefused) as caught:
        scheduler.add(request)
    assert request.id not in scheduler
    assert scheduler.num_unfinished == 0
    failure = caught.value.failure
    return failure.code, failure.status, failure.param, failure.message


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers_and_the_mend() -> None:
    scheduler, _ = make_scheduler()

    code, status, param, message = refusal_of(
        scheduler, Request.from_prompt("a", range(70), SamplingParams())
    )

    assert (code, status, param) == ("context_length_exceeded", 400, "messages")
    assert message == (
        "messages has 70 tokens and the answer needs at least 1, but the context holds 64. "
        "Shorten messages by at least 7 tokens."
    )


def test_a_prompt_of_exactly_the_context_leaves_no_room_for_an_answer() -> None:
    scheduler, _ = make_scheduler()
    refusal_of(scheduler, Request.from_prompt("a", range(64), SamplingParams()))

    request = add(scheduler, "b", prompt=63)

    assert request.max_output_tokens == 1


def test_max_tokens_beyond_the_context_is_refused_with_the_most_that_fits() -> None:
    scheduler, _ = make_scheduler()

    code, status, param, message = refusal_of(
        scheduler, Request.from_prompt("a", range(60), SamplingParams(max_tokens=5))
    )

    assert (code, status, param) == ("context_length_exceeded", 400, "max_tokens")
    assert message == (
        "messages has 60 tokens and max_tokens=5, together 65, but the context holds 64. "
        "Lower max_tokens to at most 4, or shorten messages."
    )
    assert add(scheduler, "a", prompt=60, max_tokens=4).max_output_tokens == 4


def test_a_prompt_is_too_long_whatever_max_tokens_asks() -> None:
    scheduler, _ = make_scheduler()
    request = Request.from_prompt("a", range(70), SamplingParams(max_tokens=5))
    request.prompt_param = "prompt"

    _, _, param, message = refusal_of(scheduler, request)

    assert param == "prompt"
    assert message.startswith("prompt has 70 tokens")


def test_a_pool_smaller_than_the_context_is_the_limit_and_is_named() -> None:
    scheduler, pool = make_scheduler(num_blocks=6)

    *_, message = refusal_of(scheduler, Request.from_prompt("a", range(20), SamplingParams()))

    assert pool.num_slots == scheduler.max_sequence_tokens == 20
    assert "the KV cache of this engine holds 20 (the context 64)" in message
    assert add(scheduler, "b", prompt=12).max_output_tokens == 8


def test_an_empty_prompt_is_refused() -> None:
    scheduler, _ = make_scheduler()

    code, status, *_ = refusal_of(scheduler, Request.from_prompt("a", (), SamplingParams()))

    assert (code, status) == ("empty_prompt", 400)


def test_an_id_that_is_unfinished_is_not_taken_twice() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a")

    with pytest.raises(ValueError, match="Request a is already here"):
        add(scheduler, "a")

    assert scheduler.num_unfinished == 1


def test_every_unfinished_request_is_counted_as_running_or_as_waiting() -> None:
    scheduler, _, _ = make_crowded_scheduler()
    add(scheduler, "d")
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)

    step(scheduler)

    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    assert scheduler.num_unfinished == 4


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((0, 16, 8, 64), "max_num_seqs=0"),
        ((4, 3, 8, 64), "max_num_batched_tokens=3"),
        ((4, 16, 0, 64), "long_prefill_tokens=0"),
        ((4, 16, 8, 0), "max_model_len=0"),
    ],
)
def test_limits_under_which_some_request_would_stand_still_are_refused(
    limits: tuple[int, int, int, int], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        SchedulerLimits(*limits, eos_token_ids=frozenset())
