"""Where a machine's calibration and its measured steps are kept: two JSON files in the home of the installation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.planner.curve import StepCurve
from inference.planner.hardware import Calibration
from inference.planner.shape import InvalidPlan

CALIBRATION = "calibration.json"
STEPS = "measured_steps.json"


def read_calibration(home: Path) -> Calibration | None:
    """What was measured last; None if nothing was.

    Raises:
        InvalidPlan: the file is damaged.
    """
    data = _read(home / CALIBRATION, "calibration")
    return None if data is None else Calibration.from_dict(data)


def write_calibration(home: Path, calibration: Calibration) -> Path:
    """Keep it in the place of the one before; its file."""
    return _write(home / CALIBRATION, calibration.to_dict())


def read_steps(home: Path) -> tuple[StepCurve, ...]:
    """The curves that were measured last, or none.

    Raises:
        InvalidPlan: the file is damaged.
    """
    data = _read(home / STEPS, "measurement")
    if data is None:
        return ()
    curves = data.get("curves")
    if not isinstance(curves, list):
        raise InvalidPlan(
            "measurement", f"{home / STEPS} holds no curves. Delete it, and measure again."
        )
    return tuple(StepCurve.from_dict(each) for each in curves)


def write_steps(home: Path, curves: Sequence[StepCurve]) -> Path:
    """Keep them in the place of those before; their file."""
    return _write(home / STEPS, {"curves": [curve.to_dict() for curve in curves]})


def _read(path: Path, name: str) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidPlan(
            name, f"{path} cannot be read: {error}. Delete it, and measure again."
        ) from error
    if not isinstance(data, dict):
        raise InvalidPlan(name, f"{path} holds no object. Delete it, and measure again.")
    return data


def _write(path: Path, data: dict[str, Any]) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
