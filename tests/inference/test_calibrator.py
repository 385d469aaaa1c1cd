"""The measuring program: real rates of this machine, and steps of a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference import calibrator
from inference.calibrator import main, measure_steps
from inference.config import EngineConfig
from inference.planner.curve import StepCurve
from inference.planner.hardware import Calibration


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds over little: what is measured is as real, and less exact."""
    monkeypatch.setattr(calibrator, "_NUM_ROUNDS", 2)
    monkeypatch.setattr(calibrator, "_READ_BYTES", 2**24)
    monkeypatch.setattr(calibrator, "last_level_cache_bytes", lambda: 2**20)
    monkeypatch.setenv("TATKAL_ENGINE_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_the_program_prints_a_calibration(
    kernel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TATKAL_ENGINE_KERNEL", kernel)
    assert main(["rates"]) == 0
    calibration = Calibration.from_dict(json.loads(capsys.readouterr().out))
    assert 1e8 < calibration.bandwidth < 1e13
    assert set(calibration.flops) == {"bf16", "int8", "int4"}
    assert all(1e8 < rate < 1e14 for rate in calibration.flops.values())
    assert calibration.num_threads == 1
    assert calibration.memory_bytes > 2**28
    assert calibration.device().ridge("int4") > 0


def test_steps_are_those_in_which_every_sequence_gained_a_token(tiny_artifact: Path) -> None:
    config = EngineConfig(tiny_artifact, num_threads=1, dtype="float32")
    curve = measure_steps(config, "tiny/1", batches=(1, 3))
    assert [step.batch for step in curve.steps] == [1, 3]
    assert all(0 < step.seconds < 1 for step in curve.steps)
    assert (curve.version, curve.weights, curve.kv) == ("tiny/1", "fp32", "fp32")
    assert StepCurve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


def test_a_batch_that_the_version_never_runs_is_left_out(tiny_artifact: Path) -> None:
    config = EngineConfig(tiny_artifact, num_threads=1, dtype="float32", max_num_seqs=2)
    curve = measure_steps(config, "tiny/1", batches=(1, 2, 4))
    assert [step.batch for step in curve.steps] == [1, 2]
