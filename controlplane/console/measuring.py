"""Measures this machine in a child process, so that the control plane never loads torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from controlplane.errors import DomainError
from controlplane.registry.models import Version
from inference.planner.curve import StepCurve
from inference.planner.hardware import Calibration

TIMEOUT_S = 300
_MODULE = "inference.calibrator"


class NotMeasured(DomainError):
    """The measuring process failed; the message is its last line."""

    code = "not_measured"
    status = HTTPStatus.INTERNAL_SERVER_ERROR


def measure_rates() -> Calibration:
    """What this machine reads and multiplies in a second; under a minute.

    Raises:
        NotMeasured: it could not be measured.
    """
    return Calibration.from_dict(_run(["rates"]))


def measure_steps(version: Version) -> StepCurve:
    """How long decode steps of ``version`` take here.

    Raises:
        NotMeasured: it could not be measured, for instance for want of memory.
    """
    options = json.dumps({"dtype": version.dtype, **version.engine_options})
    return StepCurve.from_dict(
        _run(["steps", version.artifact, version.name, "--options", options])
    )


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", _MODULE, *arguments]
    try:
        done = subprocess.run(  # noqa: S603 (our own program, argument list fixed)
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(
            f"Measuring took more than {TIMEOUT_S} s; try again when the machine has less to do."
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NotMeasured(f"Measuring ended with {done.returncode}: {last}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
