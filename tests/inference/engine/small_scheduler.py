"""A small scheduler and the few moves that its tests make."""

from __future__ import annotations

from collections.abc import Mapping

from inference.engine.block_pool import BlockPool
from inference.engine.limits import SchedulerLimits
from inference.engine.plan import StepPlan
from inference.engine.request import Request
from inference.engine.scheduler import Scheduler
from inference.protocol import SamplingParams

EOS = 2
LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    long_prefill_tokens=8,
    max_model_len=64,
    eos_token_ids=frozenset({EOS}),
)


def make_scheduler(
    limits: SchedulerLimits = LIMITS, *, num_blocks: int = 65, block_size: int = 4
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(limits, pool), pool


def add(
    scheduler: Scheduler, request_id: str, *, prompt: int = 1, max_tokens: int | None = None
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=ord(request_id[0]))
    request = Request.from_prompt(request_id, range(100, 100 + prompt), sampling)
    scheduler.add(request)
    return request


def shares(plan: StepPlan) -> dict[str, tuple[int, int, bool]]:
    return {row.request.id: (row.start, row.num_tokens, row.samples) for row in plan.rows}


def commit(scheduler: Scheduler, plan: StepPlan, **token_ids: int) -> list[Request]:
    """Commit ``plan``; rows without a given token get 7."""
    tokens: Mapping[str, int] = {row.request.id: 7 for row in plan.rows if row.samples} | token_ids
    return scheduler.commit(plan, tokens)


def step(scheduler: Scheduler, **token_ids: int) -> dict[str, tuple[int, int, bool]]:
    plan = scheduler.plan()
    commit(scheduler, plan, **token_ids)
    return shares(plan)


def make_crowded_scheduler() -> tuple[Scheduler, BlockPool, list[Request]]:
    """Three requests that hold two of seven blocks each; every one needs a third in the next plan."""
    scheduler, pool = make_scheduler(num_blocks=8, block_size=2)
    requests = [add(scheduler, request_id, prompt=2) for request_id in "abc"]
    step(scheduler)
    step(scheduler)
    step(scheduler)
    return scheduler, pool, requests
