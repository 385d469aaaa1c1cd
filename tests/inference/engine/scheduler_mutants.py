"""Schedulers and block pools with one thing wrong each, small enough to be a slip of the hand.

They show that the checks of ``checked_scheduler`` can fail: each must be seen, and by the promise that it breaks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from inference.engine.block_pool import NULL_BLOCK, BlockPool
from inference.engine.limits import SchedulerLimits
from inference.engine.plan import PlannedRow, StepPlan
from inference.engine.request import Request, RequestRefused, Status
from inference.engine.scheduler import Scheduler
from tests.inference.engine.cache_mutants import CACHE_MUTANTS
from tests.inference.engine.mutant import Mutant


def advance_a_prefill_too_far(original: Any) -> Any:
    def commit(self: Scheduler, plan: StepPlan, token_ids: Mapping[str, int]) -> list[Request]:
        sampled: list[Request] = original(self, plan, token_ids)
        for row in plan.rows:
            if not row.is_stale and not row.samples and row.request.num_uncomputed_tokens > 1:
                row.request.num_computed_tokens += 1
        return sampled

    return commit


def plan_one_position_too_low(original: Any) -> Any:
    def plan(self: Scheduler) -> StepPlan:
        plan: StepPlan = original(self)
        rows = [replace(row, start=max(row.start - 1, 0)) for row in plan.rows]
        return replace(plan, rows=tuple(rows))

    return plan


def put_new_blocks_at_the_front(original: Any) -> Any:
    def grow(self: Scheduler, request: Request) -> bool:
        count = len(request.block_table)
        grown: bool = original(self, request)
        request.block_table[:] = request.block_table[count:] + request.block_table[:count]
        return grown

    return grow


def keep_the_progress_of_the_preempted(original: Any) -> Any:
    def preempt(self: Scheduler) -> Request:
        progress = next(reversed(self._running.values())).num_computed_tokens
        request: Request = original(self)
        request.num_computed_tokens = progress
        return request

    return preempt


def round_blocks_down(original: Any) -> Any:
    def blocks_for(self: BlockPool, num_tokens: int) -> int:
        return max(num_tokens // self.block_size, 1)

    return blocks_for


def hand_out_blocks_without_taking_them(original: Any) -> Any:
    def allocate(self: BlockPool, count: int) -> list[int]:
        block_ids: list[int] = original(self, count)
        self._free.extend(reversed(block_ids))
        return block_ids

    return allocate


def hand_out_the_null_block(original: Any) -> Any:
    def init(self: BlockPool, num_blocks: int, block_size: int) -> None:
        original(self, num_blocks, block_size)
        self._free.append(NULL_BLOCK)

    return init


def free_blocks_before_the_step_ran(original: Any) -> Any:
    def plan(self: Scheduler) -> StepPlan:
        plan: StepPlan = original(self)
        for row in plan.rows[-1:]:
            self._pool.release(row.request.block_table[-1:])
        return plan

    return plan


def release_twice(original: Any) -> Any:
    def release(self: BlockPool, block_ids: list[int]) -> None:
        original(self, block_ids)
        original(self, block_ids)

    return release


def release_twice_unnoticed(original: Any) -> Any:
    def release(self: BlockPool, block_ids: list[int]) -> None:
        original(self, block_ids)
        self._free.extend(block_ids)

    return release


def abort_without_releasing(original: Any) -> Any:
    def abort(self: Scheduler, request_id: str, **options: Any) -> bool:
        request = self._running.pop(request_id, None)
        if request is None:
            return bool(original(self, request_id, **options))
        request.status = Status.ABORTED
        request.block_table = []
        request.epoch += 1
        return True

    return abort


def abort_only_what_runs(original: Any) -> Any:
    def abort(self: Scheduler, request_id: str, **options: Any) -> bool:
        return request_id in self._running and bool(original(self, request_id, **options))

    return abort


def apply_stale_results(original: Any) -> Any:
    def end(self: Scheduler, request_id: str, *how: Any) -> bool:
        request = self._running.get(request_id) or self._waiting.get(request_id)
        ended: bool = original(self, request_id, *how)
        if request is not None:
            request.epoch -= 1
        return ended

    return end


def preempt_the_oldest(original: Any) -> Any:
    def preempt(self: Scheduler) -> Request:
        self._running.move_to_end(next(iter(self._running)))
        request: Request = original(self)
        return request

    return preempt


def put_the_preempted_at_the_back(original: Any) -> Any:
    def preempt(self: Scheduler) -> Request:
        request: Request = original(self)
        self._waiting.move_to_end(request.id)
        return request

    return preempt


def free_the_preempted_a_step_later(original: Any) -> Any:
    def preempt(self: Scheduler) -> Request:
        table = next(reversed(self._running.values())).block_table
        self._pool.share(table)
        request: Request = original(self)
        return request

    return preempt


def admit_the_youngest_first(original: Any) -> Any:
    def admissions(self: Scheduler, rows: list[PlannedRow]) -> Iterator[Request]:
        if self._waiting:
            self._waiting.move_to_end(next(reversed(self._waiting)), last=False)
        yield from original(self, rows)

    return admissions


def admit_before_those_that_run(original: Any) -> Any:
    def claims(self: Scheduler, rows: list[PlannedRow]) -> Iterator[Request]:
        admitted = []
        for request in self._admissions(rows):
            admitted.append(request)
            yield request
        yield from (request for request in original(self, rows) if request not in admitted)

    return claims


def accept_what_never_fits(original: Any) -> Any:
    def resolve(self: Scheduler, request: Request) -> int:
        try:
            return int(original(self, request))
        except RequestRefused:
            return request.sampling.max_tokens or 1

    return resolve


def allow_one_token_more(original: Any) -> Any:
    def resolve(self: Scheduler, request: Request) -> int:
        return int(original(self, request)) + 1

    return resolve


def loosen(name: str, value: object) -> Callable[[Any], Any]:
    """A scheduler that was told another limit than it must keep."""

    def mutate(original: Any) -> Any:
        def init(
            self: Scheduler, limits: SchedulerLimits, block_pool: BlockPool, **options: Any
        ) -> None:
            loose = copy.copy(limits)
            object.__setattr__(loose, name, value)
            original(self, loose, block_pool, **options)

        return init

    mutate.__name__ = f"loosen_{name}"
    return mutate


MUTANTS = [
    Mutant(Scheduler, "commit", advance_a_prefill_too_far, "B2|S5"),
    Mutant(Scheduler, "plan", plan_one_position_too_low, "B3|S5|defended: Request"),
    Mutant(Scheduler, "_grow", put_new_blocks_at_the_front, "B[23]|S5"),
    Mutant(Scheduler, "_preempt_youngest", keep_the_progress_of_the_preempted, "B2|S5"),
    Mutant(BlockPool, "blocks_for", round_blocks_down, "B3"),
    Mutant(BlockPool, "allocate", hand_out_blocks_without_taking_them, "B[13]|S5"),
    Mutant(BlockPool, "__init__", hand_out_the_null_block, "B[13]"),
    Mutant(Scheduler, "plan", free_blocks_before_the_step_ran, "B[13]"),
    Mutant(BlockPool, "release", release_twice, "defended: Block"),
    Mutant(BlockPool, "release", release_twice_unnoticed, "B1|S4|defended: Block"),
    Mutant(Scheduler, "abort", abort_without_releasing, "B[12]"),
    Mutant(Scheduler, "abort", abort_only_what_runs, "S2"),
    Mutant(Scheduler, "_end", apply_stale_results, "S2|defended"),
    Mutant(Scheduler, "_preempt_youngest", preempt_the_oldest, "S4"),
    Mutant(Scheduler, "_preempt_youngest", put_the_preempted_at_the_back, "S[34]"),
    Mutant(Scheduler, "_preempt_youngest", free_the_preempted_a_step_later, "B1|defended"),
    Mutant(Scheduler, "_admissions", admit_the_youngest_first, "S[34]"),
    Mutant(Scheduler, "_claims", admit_before_those_that_run, "S[134]"),
    Mutant(Scheduler, "_resolve_max_tokens", accept_what_never_fits, "S2"),
    Mutant(Scheduler, "_resolve_max_tokens", allow_one_token_more, "S5"),
    *CACHE_MUTANTS,
    Mutant(Scheduler, "__init__", loosen("eos_token_ids", frozenset()), "S5"),
    Mutant(Scheduler, "__init__", loosen("max_num_batched_tokens", 10**6), "S1: over the t"),
    Mutant(Scheduler, "__init__", loosen("long_prefill_tokens", 10**6), "S1: over the cap"),
    Mutant(Scheduler, "__init__", loosen("max_num_seqs", 10**6), "S1"),
]
