"""A plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from controlplane.registry.plans import Answer
from inference.planner.curve import StepCurve
from inference.planner.hardware import Calibration, Device
from inference.planner.plan import Plan, Price, Question, WhatIf
from inference.planner.queueing import Service

_COLUMN = 24


def describe(answer: Answer) -> Iterator[str]:
    """The whole plan."""
    question, plan = answer.question, answer.plan
    yield from _heading(question)
    yield ""
    yield from _rows(_memory(question, plan))
    yield ""
    yield from _rows(_speed(question, plan))
    if plan.service is not None and question.load is not None:
        yield from _rows([("replicas", _service(plan.service))])
    yield ""
    yield from _table(plan.what_ifs)
    for note in plan.notes:
        yield ""
        yield f"Note: {note}"


def describe_calibration(calibration: Calibration) -> Iterator[str]:
    """What was measured."""
    device = calibration.device()
    yield device.title
    yield from _rows(
        [
            ("kernel", calibration.kernel),
            ("memory", _gb(calibration.memory_bytes)),
            ("bandwidth", f"{calibration.bandwidth / 1e9:,.1f} GB/s"),
            *(
                (f"{weights} products", f"{rate / 1e9:,.1f} GFLOP/s, ridge {device.ridge(weights):.1f} FLOP/byte")
                for weights, rate in calibration.flops.items()
            ),
            ("last-level cache", f"{calibration.cache_bytes / 1e6:,.0f} MB"),
            ("how", calibration.method),
            ("when", f"{calibration.measured_at}, took {calibration.took_s:.0f} s"),
        ]
    )  # fmt: skip
    if calibration.note:
        yield f"Note: {calibration.note}"


def describe_steps(curve: StepCurve, device: Device) -> Iterator[str]:
    """Measured steps beside their floor."""
    yield (
        f"{curve.version}, {curve.weights} weights, {curve.kernel}, {curve.num_threads} threads, sequences of "
        f"{curve.context} tokens"
    )
    yield f"  {'batch':>5}  {'floor ms':>9}  {'measured ms':>11}  {'of floor':>8}  {'tokens/s':>9}"
    for step in curve.steps:
        floor_s = curve.floor_s(device, step.batch)
        yield (
            f"  {step.batch:>5}  {floor_s * 1e3:>9.2f}  {step.seconds * 1e3:>11.2f}  {step.seconds / floor_s:>7.2f}x"
            f"  {step.batch / step.seconds:>9,.0f}"
        )
    if note := curve.explain(device):
        yield f"Note: {note}"


def _heading(question: Question) -> Iterator[str]:
    device, shape = question.device, question.shape
    yield (
        f"{device.title}: {device.memory_bytes / 2**30:,.1f} GiB, {device.bandwidth / 1e9:,.6g} GB/s, "
        f"{device.rate(question.weights) / 1e12:,.6g} TFLOP/s"
    )
    yield f"  {device.source}"
    yield (
        f"{shape.params:,.4g} parameters, {shape.num_layers} layers, {shape.num_heads} heads, {shape.num_kv_heads} of "
        f"them with keys of their own, {shape.head_dim} wide; weights {question.weights}, KV cache {question.kv}"
    )


def _memory(question: Question, plan: Plan) -> list[tuple[str, str]]:
    rows = [
        ("weights", _gb(plan.weight_bytes)),
        ("free beside them", f"{_gb(plan.free_bytes)}, headroom {question.headroom:.0%}"),
        (
            "KV cache",
            f"{plan.kv_bytes_per_token:,} B per token, {plan.num_blocks:,} blocks of {question.block_size}",
        ),
        ("sequences", f"{plan.sequences} of {question.context:,} tokens"),
    ]
    if plan.standby:
        rows.append(("price of a standby", _price(plan.standby)))
    if plan.candidate:
        rows.append(("price of a candidate", _price(plan.candidate)))
    return rows


def _speed(question: Question, plan: Plan) -> list[tuple[str, str]]:
    bound = plan.compute_bound_batch
    turning = "never, at this context" if bound is None else f"from batch {bound:,} on"
    rows = [
        ("ridge", f"{plan.ridge:.1f} FLOP/byte"),
        ("decode floor", f"{plan.decode_floor_s * 1e3:.4g} ms a step"),
        (
            "compute-bound",
            f"{turning}; without KV reads from batch {plan.weights_bound_batch:,.1f}",
        ),
        ("prefill", f"{plan.prefill_s * 1e3:.4g} ms for {question.prompt_tokens:,} tokens"),
    ]
    if plan.decode_s and plan.tokens_per_s:
        rows.append(
            (
                f"at batch {plan.batch}",
                f"{plan.decode_s * 1e3:.4g} ms a step, at most {plan.tokens_per_s:,.0f} tokens/s, intensity "
                f"{plan.batch_intensity:.4g} FLOP per weight byte (2B/d), {plan.intensity:.4g} with KV reads",
            )
        )
    if plan.cost:
        rows.append(
            (
                "cost",
                f"{plan.cost.per_1k_tokens:.4g} per 1k tokens, {plan.cost.per_query:.4g} per query of "
                f"{question.prompt_tokens}+{question.output_tokens} tokens",
            )
        )
    rows.append(("static batching", _batching(question, plan)))
    return rows


def _batching(question: Question, plan: Plan) -> str:
    batching = plan.batching
    if batching.held_slot_steps is not None and batching.speedup is not None:
        return (
            f"wastes {batching.wasted_slot_steps} of {batching.held_slot_steps} slot-steps ({batching.waste:.2%}) in "
            f"batches of {batching.batch}; continuous batching ends {batching.speedup:.2f}x as fast"
        )
    return (
        f"wastes {batching.waste:.1%} of its slot-steps in batches of {batching.batch}, answers geometric with mean "
        f"{question.output_tokens}"
    )


def _service(service: Service) -> str:
    return (
        f"{service.replicas} with {service.slots} sequences each: first token within {service.ttft_s * 1e3:,.0f} ms (p99), "
        f"then one every {service.tpot_s * 1e3:.1f} ms, {service.utilisation:.0%} used"
    )


def _price(price: Price) -> str:
    return f"{price.sequences} sequences ({_gb(price.num_bytes)}); {price.sequences_left} are left"


def _table(rows: Sequence[WhatIf]) -> Iterator[str]:
    yield "What if:"
    yield (
        f"  {'weights':<8}{'context':>8}{'weights GB':>12}{'free GB':>9}{'sequences':>11}{'floor ms':>10}{'tokens/s':>11}"
    )
    for row in rows:
        ceiling = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
        yield (
            f"  {row.weights:<8}{row.context:>8,}{row.weight_bytes / 1e9:>12,.2f}{row.free_bytes / 1e9:>9,.2f}"
            f"{row.sequences:>11,}{row.decode_floor_s * 1e3:>10.2f}{ceiling:>11}"
        )


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in rows:
        yield f"  {name:<{_COLUMN}}{text}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
