"""`manage.py plan`: the reference figures in words, JSON, and measurements that a child process makes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.console import measuring
from inference.calibration import read_calibration, read_steps, write_calibration
from tests.controlplane.small_artifact import make_planned_version
from tests.inference.planner import reference

SIZES = ("--hardware", "a100-40gb", "--params", "7e9", "--layers", "32", "--hidden", "4096")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> Path:
    """A home in which nothing was measured yet."""
    settings.TATKAL_HOME = tmp_path
    return tmp_path


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("plan", *arguments, stdout=out, skip_checks=True)
    return out.getvalue()


def test_the_reference_figures_are_told() -> None:
    told = run(
        *SIZES, "--context", "2048", "--weights", "fp16", "--standby", "--price-per-hour", "2"
    )
    for part in (
        "28.95 GB", "524,288 B per token", "26 of 2,048 tokens", "200.6 FLOP/byte", "9.003 ms",
        "13 sequences", "per 1k tokens", "never, at this context",
    ):  # fmt: skip
        assert part in told


def test_int4_and_the_waste_of_a_static_batch_are_told() -> None:
    told = run(*SIZES, "--weights", "int4", "--context", "4096", "--lengths", "4,10,14,16")
    for part in ("39.45 GB", "18 of 4,096 tokens", "2.251 ms", "20 of 64 slot-steps (31.25%)"):
        assert part in told


def test_json_is_the_same_plan() -> None:
    plan = json.loads(run(*SIZES, "--json", "--kv-heads", "8"))
    assert plan["sequences"] == 107
    assert plan["model"]["num_kv_heads"] == 8


def test_replicas_are_told() -> None:
    told = run(*SIZES, "--rate", "20", "--ttft", "0.3", "--tpot", "0.03")
    assert "first token within" in told


@pytest.mark.django_db
def test_a_version_is_planned_by_name(tmp_path: Path) -> None:
    name = make_planned_version(tmp_path).name
    told = run("--hardware", "l4", "--version", name)
    assert "4 of them with keys of their own" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--hardware", "a1"), "--hardware: hardware='a1' is not known; use one of a100-40gb"),
        ((*SIZES, "--kv-heads", "5"), "--kv-heads: num_kv_heads=5 must divide num_heads=32"),
        (SIZES[:-2], "--hidden: hidden_size is missing"),
        ((), "--hardware: hardware is missing"),
        (("--measure", "tiny/1"), "add --calibrate"),
    ],
)
def test_a_bad_value_is_told_by_flag_value_and_mend(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(CommandError) as error:
        run(*arguments)
    assert told in str(error.value)


def test_a_calibration_is_kept_and_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_rates", lambda: reference.CALIBRATION)
    told = run("--calibrate", "--hardware", "this-machine", *SIZES[2:])
    assert "20.0 GB/s" in told
    assert "measured 2026-01-02T03:04:05+00:00" in told
    assert read_calibration(home) == reference.CALIBRATION


@pytest.mark.django_db
def test_measured_steps_are_kept_and_told_beside_their_floor(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_calibration(home, reference.CALIBRATION)
    version = make_planned_version(home)
    monkeypatch.setattr(measuring, "measure_steps", lambda _: reference.CURVE)
    told = run("--measure", version.name)
    assert "10.00" in told
    assert read_steps(home) == (reference.CURVE,)


def test_a_child_that_fails_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_MODULE", "inference.no_such_module")
    with pytest.raises(measuring.NotMeasured, match=r"No module named inference\.no_such_module"):
        measuring.measure_rates()


@pytest.mark.slow
@pytest.mark.django_db
def test_a_child_measures_and_this_process_never_loads_torch(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had_torch = "torch" in sys.modules
    version = make_planned_version(home)
    with pytest.raises(measuring.NotMeasured, match=r"ended with 1: .*(BrokenArtifact|model)"):
        measuring.measure_steps(version)
    assert ("torch" in sys.modules) is had_torch
