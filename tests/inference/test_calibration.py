"""A calibration outlives the process that measured it, and a damaged file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.calibration import (
    CALIBRATION,
    STEPS,
    read_calibration,
    read_steps,
    write_calibration,
    write_steps,
)
from inference.planner.shape import InvalidPlan
from tests.inference.planner import reference


def test_what_was_kept_is_read_again_and_nothing_is_left_over(tmp_path: Path) -> None:
    assert read_calibration(tmp_path) is None
    assert read_steps(tmp_path) == ()
    write_calibration(tmp_path, reference.CALIBRATION)
    write_steps(tmp_path, [reference.CURVE])
    assert read_calibration(tmp_path) == reference.CALIBRATION
    assert read_steps(tmp_path) == (reference.CURVE,)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CALIBRATION, STEPS])


@pytest.mark.parametrize("text", ["{", "[]", '{"machine": "x"}'])
def test_a_damaged_file_is_told_with_the_mend(tmp_path: Path, text: str) -> None:
    (tmp_path / CALIBRATION).write_text(text)
    with pytest.raises(InvalidPlan, match=r"easure again"):
        read_calibration(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"curves": null}', '{"curves": [1]}'])
def test_damaged_steps_are_told_with_the_mend(tmp_path: Path, text: str) -> None:
    (tmp_path / STEPS).write_text(text)
    with pytest.raises(InvalidPlan, match=r"easure again"):
        read_steps(tmp_path)
