"""What steps cost and who pays: the rule on plain values, then the sums on engines that really compute."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.config import EngineConfig, ModelConfig
from inference.engine.llm_engine import GENERATION_FAILED, LLMEngine
from inference.engine.plan import PlannedRow
from inference.engine.request import Request, StepOutput
from inference.engine.telemetry import WINDOW_S, ModelCost, Telemetry, share_out
from inference.planner.hardware import Device
from inference.planner.roofline import Roofline
from inference.planner.shape import ModelShape
from inference.protocol import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MODEL = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=512,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    eos_token_ids=(0,),
)
SHAPE = ModelShape.of_config(MODEL, params=300_000, weight_bytes=600_000)
KV_BYTES = 2 * 3 * 2 * 16 * 2
COST = ModelCost.of(MODEL, SHAPE, kv_bytes_per_token=KV_BYTES)
MACHINE = Device("this-machine", "", 2**30, 1e6, 2e7, 2e7, "test")


def row(
    request_id: str = "a", *, start: int = 0, num: int = 1, prompt: int = 8, **fields: Any
) -> PlannedRow:
    """``num`` tokens of a request from ``start``; it samples when it reaches the end of its prompt."""
    request = Request(request_id, [1] * max(prompt, start + num), prompt, GREEDY, **fields)
    return PlannedRow(request, start, num, samples=start + num >= prompt)


def end(request_id: str = "a") -> StepOutput:
    """The last output of a request."""
    return StepOutput(request_id, 0, 1, "", FinishReason.STOP, None, 8, 1, 0.0)


class Clock:
    """Stands still between the moves of a test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


rows = st.builds(
    row,
    st.uuids().map(str),
    start=st.integers(0, 4000),
    num=st.integers(1, 300),
    prompt=st.integers(1, 4000),
    first_logit=st.none() | st.integers(0, 4000),
)


@given(st.lists(rows, min_size=1, max_size=20), st.floats(0, 1000))
def test_the_shares_of_a_step_are_positive_and_together_the_whole(
    step: list[PlannedRow], ridge: float
) -> None:
    shares = share_out(step, COST, ridge)
    assert all(share > 0 for share in shares)
    assert sum(shares) == pytest.approx(1.0, rel=1e-12)


@given(st.lists(rows, min_size=2, max_size=8), st.integers(1, 100))
def test_whoever_has_more_tokens_or_looks_back_further_pays_more(
    step: list[PlannedRow], more: int
) -> None:
    first = step[0]
    longer = replace(first, start=first.start + more)
    wider = replace(first, num_tokens=first.num_tokens + more)
    for dearer in (longer, wider):
        shares = share_out([first, dearer, *step[1:]], COST, 20.0)
        assert shares[1] > shares[0]


@given(st.lists(rows, min_size=1, max_size=8))
def test_equal_rows_pay_equally_wherever_they_stand(step: list[PlannedRow]) -> None:
    shares = share_out([step[0], *step, step[0]], COST, 20.0)
    assert shares[0] == shares[1] == shares[-1]


def test_the_weights_are_shared_and_the_context_is_ones_own() -> None:
    cost = ModelCost(1000.0, 10.0, 5.0, 7.0, 2.0)
    step = [
        row(start=9, num=1),
        row("b", start=0, num=4),
    ]  # b has not reached the end of its prompt
    first = 20 * (1000 / 5 + 10 * 10 + 10) + 5 + 7 + 2 * 10
    second = 20 * (4 * 1000 / 5 + 4 * 10 + 4 * 10) + 4 * 5 + 2 * (1 + 2 + 3 + 4)
    assert share_out(step, cost, 20.0) == pytest.approx(
        [first / (first + second), second / (first + second)]
    )


def test_a_scored_answer_pays_for_each_of_its_logits() -> None:
    cost = ModelCost(0.0, 0.0, 1.0, 100.0, 0.0)
    plain, scored = row(num=10, prompt=10), row("b", num=10, prompt=10, first_logit=4)
    shares = share_out([plain, scored], cost, 0.0)
    assert shares == pytest.approx([110 / 720, 610 / 720])


steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),  # who takes part
        st.floats(1e-4, 10.0),  # how long it takes
        st.sets(st.integers(0, 5)),  # who ends with an answer
        st.sets(st.integers(0, 5)),  # who is given up
    ),
    min_size=1,
    max_size=12,
)


@given(steps)
def test_what_is_billed_lost_and_still_open_is_the_time_of_the_steps(history: Any) -> None:
    telemetry = Telemetry(COST)
    billed, busy_s, positions = 0.0, 0.0, defaultdict[int, int](int)
    for who, seconds, ending, given_up in history:
        step = [row(str(each), start=positions[each]) for each in who]
        ends = [end(str(each)) for each in who if each in ending]
        billed += sum(output.engine_s for output in telemetry.bill(step, ends, seconds))
        busy_s += seconds
        for each in who:
            positions[each] += 1
        for each in given_up:
            telemetry.forgive(str(each))
    for each in range(6):  # whatever is still open
        telemetry.forgive(str(each))
    assert telemetry.totals.busy_s == pytest.approx(busy_s)
    assert billed + telemetry.totals.unbilled_s == pytest.approx(busy_s, rel=1e-9)


def test_who_fails_is_no_answer_and_is_not_billed() -> None:
    telemetry = Telemetry(COST)
    failed = replace(end("b"), finish_reason=None, failure=GENERATION_FAILED)
    answer, failure = telemetry.bill([row(), row("b")], [end(), failed], 2.0)
    assert (answer.engine_s, failure.engine_s) == pytest.approx((1.0, 0.0))
    assert telemetry.totals.unbilled_s == pytest.approx(1.0)


def test_only_the_last_output_bears_the_bill() -> None:
    telemetry = Telemetry(COST)
    middle = replace(end(), finish_reason=None)
    assert telemetry.bill([row()], [middle], 1.0)[0].engine_s == 0.0
    assert telemetry.bill([row(start=8)], [end()], 2.0)[0].engine_s == pytest.approx(3.0)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_decode_step_counts_what_the_planner_reckons(batch: int) -> None:
    telemetry = Telemetry(COST)
    context = 40
    telemetry.bill([row(str(each), start=context - 1) for each in range(batch)], [], 1.0)
    planned = Roofline(MACHINE, SHAPE, "bf16", "bf16").decode_work(batch, context)
    assert telemetry.totals.flops == pytest.approx(planned.flops)
    assert telemetry.totals.bytes_read == pytest.approx(planned.num_bytes)
    assert telemetry.totals.bytes_written == batch * KV_BYTES


def test_a_prompt_counts_what_the_planner_reckons_but_for_logits_that_nobody_needs() -> None:
    telemetry = Telemetry(COST)
    telemetry.bill([row(num=200, prompt=200)], [], 1.0)
    planned = Roofline(MACHINE, SHAPE, "bf16", "bf16").prefill_work(200)
    unneeded = 199 * 2 * MODEL.vocab_size * MODEL.hidden_size
    assert telemetry.totals.flops == pytest.approx(planned.flops - unneeded, rel=1e-3)
    assert telemetry.totals.bytes_read == pytest.approx(planned.num_bytes)


def test_prompt_positions_decodes_and_chosen_tokens_are_told_apart() -> None:
    telemetry = Telemetry(COST)
    telemetry.bill([row(num=5), row("b", start=8), row("c", num=1, prompt=1)], [], 1.0)
    totals = telemetry.totals
    assert (totals.num_prefill_tokens, totals.num_decode_tokens, totals.num_generated) == (6, 1, 2)
    assert (totals.num_rows, totals.num_steps) == (3, 1)


def test_a_prompt_is_asked_of_the_cache_once_and_its_hits_are_on_the_bill() -> None:
    telemetry = Telemetry(COST)
    first = row(start=4, num=2, num_cached_tokens=4)
    telemetry.bill([first], [], 1.0)
    telemetry.bill([replace(first, start=6)], [], 1.0)
    last = telemetry.bill([replace(first, start=8, num_tokens=1)], [end()], 1.0)[0]
    assert (telemetry.totals.num_prefix_queries, telemetry.totals.num_prefix_hits) == (8, 4)
    assert last.num_cached_tokens == 4


def test_a_report_is_of_the_last_seconds_and_of_the_time_that_was_computed() -> None:
    clock = Clock()
    telemetry = Telemetry(COST, clock=clock)
    telemetry.bill([row(str(each), start=20) for each in range(50)], [], 1.0)  # soon too long ago
    clock.now += 2 * WINDOW_S
    for _ in range(10):
        clock.now += 1.0
        telemetry.bill([row("a", start=8), row("b", start=8)], [], 0.25)
    report = telemetry.report()
    assert report["batch_rows"] == 2
    assert report["busy"] == pytest.approx(0.25, rel=0.15)
    assert report["tokens_per_s"] == pytest.approx(2.0, rel=0.15)
    per_step = Roofline(MACHINE, SHAPE, "bf16", "bf16").decode_work(2, 9)
    assert report["flops_per_s"] == pytest.approx(per_step.flops / 0.25)
    moved = per_step.num_bytes + 2 * KV_BYTES
    assert report["bytes_per_s"] == pytest.approx(moved / 0.25)
    assert report["intensity"] == pytest.approx(per_step.flops / moved)


def test_the_used_part_of_the_machine_is_told_once_it_was_measured() -> None:
    telemetry = Telemetry(COST, weights="int4")
    telemetry.bill([row(start=8)], [], 2.0)
    assert (telemetry.report()["mbu"], telemetry.report()["mfu"]) == (None, None)
    telemetry.calibrate(replace(MACHINE, flops_by_weights={"int4": 5e6}))
    report, totals = telemetry.report(), telemetry.totals
    assert report["mbu"] == pytest.approx(totals.bytes_moved / 2.0 / 1e6)
    assert report["mfu"] == pytest.approx(totals.flops / 2.0 / 5e6)


def test_the_first_step_after_a_pause_is_told_and_nothing_from_before_it() -> None:
    clock = Clock()
    telemetry = Telemetry(COST, clock=clock)
    telemetry.bill([row(str(each), start=20) for each in range(50)], [], 1.0)
    clock.now += 3600
    telemetry.bill([row(start=8)], [], 0.5)
    report = telemetry.report()
    assert report["batch_rows"] == 1
    assert report["busy"] == pytest.approx(1.0)
    assert report["tokens_per_s"] == pytest.approx(2.0)


def test_on_a_calibrated_machine_shares_follow_its_ridge_point() -> None:
    step = [row(start=4000, prompt=1), row("b", num=50, prompt=50)]
    bills = []
    for flops in (1e3, 1e12):
        telemetry = Telemetry(COST)
        telemetry.calibrate(replace(MACHINE, flops=flops))
        bills.append(telemetry.bill(step, [end()], 1.0)[0].engine_s)
        assert bills[-1] == pytest.approx(share_out(step, COST, flops / MACHINE.bandwidth)[0])
    assert bills[0] < bills[1]  # where bytes are dear, whoever looks back far pays more


def test_an_idle_engine_reports_no_speed() -> None:
    clock = Clock()
    telemetry = Telemetry(COST, clock=clock)
    telemetry.bill([row(start=8)], [], 1.0)
    clock.now += WINDOW_S + 0.1
    report = telemetry.report()
    assert (report["busy"], report["tokens_per_s"]) == (0.0, 0.0)
    assert {report[name] for name in ("mbu", "batch_rows", "bytes_per_s", "intensity")} == {None}


def test_memory_stays_bounded_over_a_day_of_steps() -> None:
    clock = Clock()
    telemetry = Telemetry(COST, clock=clock)
    for number in range(20_000):
        clock.now += 4.0
        telemetry.bill([row(str(number))], [end(str(number))], 1.0)
    assert not telemetry._bills
    assert len(telemetry._marks) < 30
    assert sum(telemetry.step_tokens) == sum(telemetry.step_seconds) == 20_000


# ------------------------------------------------------------------------------------------ engines that compute


def run(engine: LLMEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Any:
    """Answer all together: engine seconds by request, and the time of the steps as seen from outside."""
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, replace(sampling, max_tokens=4 + 5 * index))
    billed: dict[str, float] = {}
    busy_s = 0.0
    while engine.has_unfinished:
        began_at = time.perf_counter()
        outputs = engine.step()
        busy_s += time.perf_counter() - began_at
        billed |= {each.request_id: each.engine_s for each in outputs if each.is_last}
    return billed, busy_s


def load(artifact: Path, **options: Any) -> LLMEngine:
    """On one thread."""
    values: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 30}
    return LLMEngine.load(EngineConfig(artifact, num_threads=1, **{**values, **options}))


def test_attributed_seconds_survive_preemption_abort_and_choices(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact, max_num_seqs=8, max_model_len=100)
    engine.add_request("gone", range(10), GREEDY)
    engine.add_request("many", range(5), GREEDY, n=3)
    engine.step()
    engine.abort("gone")
    prompts = [[(7 * index + position) % 190 for position in range(12)] for index in range(6)]
    billed: dict[tuple[str, int], float] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, replace(GREEDY, max_tokens=30))
    while engine.has_unfinished:
        for each in engine.step():
            if each.is_last:
                billed[each.request_id, each.choice] = each.engine_s
    assert engine.num_preemptions > 0
    assert len(billed) == 9
    totals = engine.telemetry.totals
    assert totals.unbilled_s > 0
    assert sum(billed.values()) + totals.unbilled_s == pytest.approx(totals.busy_s)
    assert not engine.telemetry._bills


@pytest.mark.slow
def test_attributed_seconds_are_the_busy_time_of_the_real_model_within_one_per_cent(
    real_artifact: Path,
) -> None:
    engine = load(real_artifact, dtype="bfloat16", block_size=16, num_blocks=200, max_model_len=400)
    engine.warm_up()
    prompts = [
        [(13 * index + position) % 900 for position in range(20 * index + 8)] for index in range(6)
    ]
    billed, busy_s = run(engine, prompts, GREEDY)
    assert sum(billed.values()) == pytest.approx(busy_s, rel=0.01)
    assert sorted(billed.values()) == list(billed.values())  # longer prompts and answers cost more


@pytest.mark.slow
def test_counting_takes_less_than_one_per_cent_of_a_decode_step(real_artifact: Path) -> None:
    engine = load(real_artifact, dtype="bfloat16", block_size=16, num_blocks=200, max_model_len=400)
    telemetry, counting_s = engine.telemetry, list[float]()
    bill = telemetry.bill

    def timed(rows: Any, outputs: Any, seconds: float) -> Any:
        began_at = time.perf_counter()
        result = bill(rows, outputs, seconds)
        counting_s.append((time.perf_counter() - began_at) / seconds)
        return result

    telemetry.bill = timed  # type: ignore[method-assign]
    for index in range(8):
        engine.add_request(f"r{index}", range(8), replace(GREEDY, max_tokens=20))
    while engine.has_unfinished:
        engine.step()
    assert statistics.median(counting_s) < 0.01
