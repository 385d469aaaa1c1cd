"""What the scheduler does not compute again: cached beginnings, the prompt of further choices, swapped-out requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from inference.engine.block_pool import BlockPool
from inference.engine.choices import make_choices
from inference.engine.plan import Move, MoveKind, StepPlan
from inference.engine.request import Request, Status
from inference.engine.scheduler import Scheduler
from inference.engine.swap import PreemptionCosts
from inference.protocol import FinishReason, SamplingParams
from tests.inference.engine.small_scheduler import LIMITS, commit, shares, step

SIZE = 4
PROMPT = list(range(100, 114))  # three full blocks and two tokens


def _scheduler(
    *, num_blocks: int = 65, version: str | None = "v", worth_waiting_tokens: int = 8
) -> tuple[Scheduler, BlockPool]:
    limits = replace(
        LIMITS,
        max_num_batched_tokens=32,
        long_prefill_tokens=16,
        worth_waiting_tokens=worth_waiting_tokens,
    )
    pool = BlockPool(num_blocks, SIZE)
    costs = PreemptionCosts(1, copy_bytes_per_s=1e9, prefill_tokens_per_s=1.0)
    return Scheduler(limits, pool, version=version, costs=costs), pool


def _add(
    scheduler: Scheduler,
    name: str,
    prompt: Sequence[int] = PROMPT,
    *,
    max_tokens: int | None = None,
    n: int = 1,
    salt: str = "",
    first_logit: int | None = None,
) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    requests = make_choices(name, prompt, sampling, n=n, cache_salt=salt)
    for request in requests:
        request.first_logit = first_logit
        scheduler.add(request)
    return requests


def _kinds(plan: StepPlan) -> list[MoveKind]:
    kinds = [move.kind for move in plan.moves]
    plan.moves.clear()
    return kinds


def test_a_prompt_starts_behind_the_blocks_of_one_that_began_alike() -> None:
    scheduler, pool = _scheduler()
    [first] = _add(scheduler, "a")
    step(scheduler)
    scheduler.abort("a")
    assert (pool.num_held, pool.cache.num_idle, pool.num_free) == (0, 3, 64)

    [second] = _add(scheduler, "b", [*PROMPT[:9], 7, 7, 7, 7])

    assert step(scheduler) == {"b": (8, 5, True)}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert (pool.num_held, pool.cache.num_idle) == (4, 1)
    scheduler.check_integrity()


@pytest.mark.parametrize(("length", "start"), [(12, 8), (13, 12), (4, 0), (1, 0)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, start: int) -> None:
    scheduler, _ = _scheduler()
    _add(scheduler, "a", PROMPT)
    step(scheduler)
    _add(scheduler, "b", PROMPT[:length])
    assert step(scheduler)["b"] == (start, length - start, True)


def test_where_logits_are_asked_for_nothing_is_skipped() -> None:
    scheduler, _ = _scheduler()
    _add(scheduler, "a")
    step(scheduler)
    _add(scheduler, "b", first_logit=6)
    assert step(scheduler)["b"] == (4, 10, True)


def test_answers_are_cached_like_prompts() -> None:
    scheduler, _ = _scheduler()
    [request] = _add(scheduler, "a", PROMPT, max_tokens=8)
    while not request.is_finished:
        step(scheduler)
    _add(scheduler, "b", [*request.tokens, 5, 5])
    assert step(scheduler)["b"] == (20, 4, True)


@pytest.mark.parametrize(("version", "salt"), [(None, ""), ("v", "other tenant")])
def test_nothing_is_shared_when_the_cache_is_off_or_the_tenant_another(
    version: str | None, salt: str
) -> None:
    scheduler, pool = _scheduler(version=version)
    _add(scheduler, "a")
    step(scheduler)
    [request] = _add(scheduler, "b", salt=salt)
    assert step(scheduler)["b"] == (0, 14, True)
    assert request.num_cached_tokens == 0
    assert pool.cache.num_blocks == (0 if version is None else 6)


def test_two_that_compute_the_same_at_once_share_it_afterwards() -> None:
    scheduler, pool = _scheduler(worth_waiting_tokens=100)
    [first] = _add(scheduler, "a")
    [second] = _add(scheduler, "b")
    plan = scheduler.plan()
    assert shares(plan) == {"a": (0, 14, True), "b": (0, 14, True)}
    assert not set(first.block_table) & set(second.block_table)

    commit(scheduler, plan)

    assert first.block_table[:3] == second.block_table[:3]
    assert pool.num_held == 5
    scheduler.check_integrity()


def test_who_would_compute_the_same_waits_for_the_older_one() -> None:
    scheduler, _ = _scheduler()
    _add(scheduler, "a")
    _add(scheduler, "b")
    assert step(scheduler) == {"a": (0, 14, True)}
    assert step(scheduler) == {"a": (14, 1, True), "b": (12, 2, True)}


def test_idle_blocks_are_handed_out_when_no_free_one_is_left_the_last_of_a_prompt_first() -> None:
    scheduler, pool = _scheduler(num_blocks=7)
    _add(scheduler, "a", PROMPT)
    step(scheduler)
    scheduler.abort("a")
    _add(scheduler, "b", range(16), max_tokens=1)
    step(scheduler)
    scheduler.abort("b")
    assert pool.num_free == 6
    _add(scheduler, "c", PROMPT)
    assert step(scheduler)["c"][0] == 8


def test_what_a_broken_request_computed_is_found_by_nobody() -> None:
    scheduler, pool = _scheduler()
    _add(scheduler, "a", PROMPT)
    step(scheduler)
    scheduler.abort("a", is_broken=True)
    assert (pool.cache.num_blocks, pool.num_free) == (0, 64)
    _add(scheduler, "b", PROMPT)
    assert step(scheduler)["b"][0] == 0


@pytest.mark.parametrize("version", ["v", None])
@pytest.mark.parametrize(
    ("length", "num_copies", "num_held"), [(14, 2, 6), (12, 2, 5), (13, 0, 6), (1, 0, 3)]
)
def test_choices_share_the_prompt_and_copy_the_block_they_write_to(
    version: str | None, length: int, num_copies: int, num_held: int
) -> None:
    scheduler, pool = _scheduler(version=version)
    requests = _add(scheduler, "a", PROMPT[:length], n=3)
    assert step(scheduler) == {"a": (0, length, True)}
    last = length - 1

    plan = scheduler.plan()

    assert shares(plan) == {
        "a": (length, 1, True),
        "a#1": (last, 1, True),
        "a#2": (last, 1, True),
    }
    shared = requests[0].block_table[: last // SIZE]
    assert all(each.block_table[: last // SIZE] == shared for each in requests)
    assert [move.source for move in plan.moves] == num_copies * [
        requests[0].block_table[last // SIZE]
    ]
    assert _kinds(plan) == num_copies * [MoveKind.COPY]
    commit(scheduler, plan)
    assert pool.num_held <= num_held + 1
    scheduler.check_integrity()


def test_choices_wait_while_their_prompt_is_being_computed() -> None:
    scheduler, _ = _scheduler(version=None)
    _add(scheduler, "a", range(20), n=2)
    assert step(scheduler) == {"a": (0, 16, False)}
    assert step(scheduler) == {"a": (16, 4, True)}
    assert step(scheduler) == {"a": (20, 1, True), "a#1": (19, 1, True)}


def test_each_choice_ends_alone_and_frees_what_it_alone_held() -> None:
    scheduler, pool = _scheduler()
    first, second = _add(scheduler, "a", PROMPT, n=2)
    step(scheduler)
    step(scheduler)
    scheduler.finish("a", FinishReason.STOP)
    assert first.is_finished
    assert second.status is Status.RUNNING
    assert pool.num_held == len(second.block_table)
    step(scheduler)
    scheduler.abort("a#1")
    assert pool.num_held == 0
    scheduler.check_integrity()


def test_a_choice_whose_first_one_is_gone_computes_the_prompt_itself() -> None:
    scheduler, _ = _scheduler(version=None)
    _add(scheduler, "a", PROMPT, n=2)
    scheduler.abort("a")
    assert step(scheduler) == {"a#1": (0, 14, True)}


def _crowded(num_slots: int) -> tuple[Scheduler, BlockPool, list[Request]]:
    """Three requests in six blocks; in the next plan each needs a third block."""
    scheduler, pool = _scheduler(num_blocks=7, version=None)
    assert scheduler.swap.resize(num_slots)
    requests = [_add(scheduler, name, PROMPT[:4])[0] for name in "abc"]
    for _ in range(5):
        step(scheduler)
    return scheduler, pool, requests


def test_a_swapped_request_goes_on_where_it_stood() -> None:
    scheduler, pool, (oldest, middle, youngest) = _crowded(num_slots=4)
    table = list(youngest.block_table)
    plan = scheduler.plan()

    assert (youngest.status, youngest.num_computed_tokens) == (Status.PREEMPTED, 8)
    assert list(plan.moves) == [
        Move(MoveKind.SWAP_OUT, block_id, slot)
        for block_id, slot in zip(table, youngest.swap_slots, strict=True)
    ]
    assert (scheduler.num_preemptions, scheduler.num_swaps, scheduler.swap.num_held) == (1, 1, 2)
    plan.moves.clear()
    commit(scheduler, plan)
    slots = list(youngest.swap_slots)
    scheduler.abort(oldest.id)
    scheduler.abort(middle.id)

    plan = scheduler.plan()

    assert shares(plan) == {"c": (8, 1, True)}
    assert list(plan.moves) == [
        Move(MoveKind.SWAP_IN, slot, block_id)
        for slot, block_id in zip(slots, youngest.block_table, strict=False)
    ]
    assert (scheduler.swap.num_held, youngest.swap_slots) == (0, [])
    scheduler.check_integrity()
    assert pool.num_held == 3


@pytest.mark.parametrize("num_slots", [0, 1])
def test_without_room_to_swap_a_request_is_computed_again(num_slots: int) -> None:
    scheduler, _, (*_, youngest) = _crowded(num_slots)
    plan = scheduler.plan()
    assert (list(plan.moves), youngest.num_computed_tokens, scheduler.num_swaps) == ([], 0, 0)
    assert scheduler.num_preemptions == 1


def test_an_abort_frees_what_lies_in_swap_space() -> None:
    scheduler, _, (*_, youngest) = _crowded(num_slots=4)
    scheduler.plan()
    assert scheduler.swap.num_held == 2
    assert scheduler.abort(youngest.id)
    assert scheduler.swap.num_held == 0
    scheduler.check_integrity()


def test_a_swapped_request_copies_only_what_is_no_longer_cached() -> None:
    scheduler, _ = _scheduler(num_blocks=7)
    assert scheduler.swap.resize(8)
    lengths = {"a": 4, "b": 2, "c": 4}
    requests = [_add(scheduler, name, [ord(name)] * lengths[name])[0] for name in lengths]
    for _ in range(5):
        step(scheduler)
    plan = scheduler.plan()
    assert _kinds(plan) == [MoveKind.SWAP_OUT] * 2
    commit(scheduler, plan)
    scheduler.abort(requests[0].id)
    scheduler.abort(requests[1].id)
    plan = scheduler.plan()
    # The pool took the last block of "c" for a token of "a"; the first one is still cached.
    assert _kinds(plan) == [MoveKind.SWAP_IN]
    assert shares(plan) == {"c": (8, 1, True)}
    assert requests[2].num_kept_blocks == 1


def test_a_plan_that_never_ran_leaves_its_moves_to_the_next() -> None:
    scheduler, _, _ = _crowded(num_slots=4)
    first = list(scheduler.plan().moves)
    assert first
    assert list(scheduler.plan().moves) == first
