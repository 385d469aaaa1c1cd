"""A plan becomes one forward pass: rows in the order of the plan, and only those that sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference.artifact import read_manifest
from inference.engine.block_pool import BlockPool
from inference.engine.kv_cache import KVCache
from inference.engine.limits import SchedulerLimits
from inference.engine.request import Request
from inference.engine.runner import Runner
from inference.engine.scheduler import Scheduler
from inference.models.decoder import Decoder
from inference.protocol import SamplingParams

CPU = torch.device("cpu")
NUM_TOKEN_IDS = 258


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def decoder(tiny_artifact: Path) -> Decoder:
    return Decoder.load(
        tiny_artifact,
        read_manifest(tiny_artifact),
        num_positions=128,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.fixture
def runner(decoder: Decoder) -> Runner:
    cache = KVCache(
        num_layers=decoder.model.num_layers,
        num_blocks=40,
        block_shape=decoder.block_shape(4),
        dtype=torch.float32,
        device=CPU,
    )
    return Runner(decoder, cache, num_token_ids=NUM_TOKEN_IDS)


@pytest.fixture
def scheduler() -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_tokens=10,
        max_model_len=128,
        eos_token_ids=frozenset(),
    )
    return Scheduler(limits, BlockPool(40, 4))


def _request(name: str, length: int) -> Request:
    tokens = [(7 * index + length) % 250 for index in range(length)]
    return Request.from_prompt(name, tokens, SamplingParams(max_tokens=5))


def test_only_rows_that_sample_get_logits(runner: Runner, scheduler: Scheduler) -> None:
    for name, length in (("short", 3), ("long", 25), ("exact", 10)):
        scheduler.add(_request(name, length))
    plan = scheduler.plan()
    assert [row.samples for row in plan.rows] == [True, False, True]
    logits = runner.run(plan)
    assert logits.shape == (2, 320)
    assert logits.dtype == torch.float32


def test_a_step_in_which_nothing_samples_gives_no_logits(
    runner: Runner, scheduler: Scheduler
) -> None:
    scheduler.add(_request("long", 25))
    assert runner.run(scheduler.plan()).shape == (0, 320)


def test_rows_stand_in_the_order_of_the_plan(
    decoder: Decoder, runner: Runner, scheduler: Scheduler
) -> None:
    requests = [_request("a", 3), _request("b", 9), _request("c", 5)]
    for request in requests:
        scheduler.add(request)
    together = runner.run(scheduler.plan())
    for request in requests:
        scheduler.abort(request.id)
    for request, row in zip(requests, together, strict=True):
        scheduler.add(_request(request.id, request.num_prompt_tokens))
        assert torch.equal(runner.run(scheduler.plan())[0], row)
        scheduler.abort(request.id)


def test_an_id_that_the_tokenizer_does_not_know_is_never_the_best(
    runner: Runner, scheduler: Scheduler
) -> None:
    scheduler.add(_request("a", 3))
    [row] = runner.run(scheduler.plan())
    assert row[NUM_TOKEN_IDS:].isneginf().all()
    assert row[:NUM_TOKEN_IDS].isfinite().all()


def test_a_plan_that_was_not_committed_can_run_again(runner: Runner, scheduler: Scheduler) -> None:
    scheduler.add(_request("a", 10))
    scheduler.commit(plan := scheduler.plan(), {"a": 5})
    assert plan.num_tokens == 10
    first = runner.run(scheduler.plan())
    assert torch.equal(runner.run(scheduler.plan()), first)
