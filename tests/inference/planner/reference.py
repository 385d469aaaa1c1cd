"""What tests of every face plan with: the reference case, 7B parameters on an A100 of 40 GB, and a measured machine."""

from __future__ import annotations

from typing import Any

from inference.planner.curve import MeasuredStep, StepCurve
from inference.planner.hardware import DEVICES, Calibration, Device
from inference.planner.plan import Question
from inference.planner.shape import ModelShape

SEVEN_B = ModelShape.of_sizes(params=7e9, num_layers=32, hidden_size=4096)
A100 = DEVICES["a100-40gb"]

CALIBRATION = Calibration(
    machine="A CPU",
    kernel="native",
    num_threads=2,
    memory_bytes=8 * 2**30,
    cache_bytes=32 * 2**20,
    bandwidth=20e9,
    flops={"bf16": 100e9, "int8": 250e9, "int4": 240e9},
    measured_at="2026-01-02T03:04:05+00:00",
    method="reading",
)
SHAPE = ModelShape(134_515_008, 30, 576, 9, 3, 64, weight_bytes=96_000_000)
MACHINE = Device("here", "here", 2**34, 20e9, 100e9, 100e9, "", cache_bytes=260_000_000)
CURVE = StepCurve(
    version="tiny/1",
    shape=SHAPE,
    weights="int4",
    kv="bf16",
    context=72,
    kernel="native",
    num_threads=1,
    measured_at="2026-01-02T03:04:05+00:00",
    steps=(MeasuredStep(1, 0.010), MeasuredStep(32, 0.200)),
)


def ask(**changes: Any) -> Question:
    """The reference question; ``changes`` are other values of it."""
    values: dict[str, Any] = {"device": A100, "shape": SEVEN_B, **changes}
    return Question(**values)
