"""Measured steps beside their floor, and why one may lie below it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.planner.curve import MeasuredStep, StepCurve
from inference.planner.shape import InvalidPlan
from tests.inference.planner.reference import CURVE, MACHINE


def test_the_floor_is_that_of_the_roofline() -> None:
    # 96 MB and 72 tokens of 23,040 bytes at 20 GB/s.
    assert CURVE.floor_s(MACHINE, 1) == pytest.approx((96e6 + 72 * 23_040) / 20e9)


def test_steps_above_their_floor_need_no_explanation() -> None:
    assert CURVE.explain(MACHINE) == ""


def test_a_step_faster_than_memory_is_explained_by_the_cache_and_its_size() -> None:
    fast = replace(CURVE, steps=(MeasuredStep(1, 0.003), MeasuredStep(32, 0.200)))
    told = fast.explain(MACHINE)
    assert "batch 1 were faster than memory allows" in told
    assert "96 MB) fit into the last-level cache of this machine (260 MB)" in told


def test_without_such_a_cache_the_calibration_is_what_is_doubted() -> None:
    fast = replace(CURVE, steps=(MeasuredStep(1, 0.003),))
    assert "when it was calibrated" in fast.explain(replace(MACHINE, cache_bytes=2**20))


def test_a_step_faster_than_the_products_is_not_explained_by_the_cache() -> None:
    fast = replace(CURVE, steps=(MeasuredStep(32, 0.050),))
    told = fast.explain(MACHINE)
    assert "batch 32 were faster than the products" in told
    assert "cache" not in told


def test_a_curve_survives_its_file_and_a_damaged_one_is_refused() -> None:
    assert StepCurve.from_dict(CURVE.to_dict()) == CURVE
    with pytest.raises(InvalidPlan, match="--measure"):
        StepCurve.from_dict({"version": "tiny/1"})
